// What threads of a warp, a CTA or a cluster do together, and wgmma, compiled once for all kernels.
#include "machine.cuh"

namespace emulator {

void together(const void* given, void* taken, Compute* compute, const void* function) {
  const uint32_t thread = cta->running->thread;
  WarpSync& sync = cta->warps[thread / kWarp];
  // All lanes must have left the previous instruction.
  wait([&sync] { return sync.left == 0; }, &sync.waiters);
  sync.given[thread % kWarp] = given;
  sync.taken[thread % kWarp] = taken;
  if (++sync.arrived == kWarp) {
    compute(sync.given, sync.taken, function);
    sync.left = kWarp;
    sync.arrived = 0;
    wake(sync.waiters);
  } else {
    wait([&sync] { return sync.left > 0; }, &sync.waiters);
  }
  if (--sync.left == 0) wake(sync.waiters);
}

void settle(Barrier& barrier) {
  if (barrier.pending < 0) fail("a barrier has more arrivals than it counts");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase++;
    barrier.pending = barrier.arrivals;
    wake(barrier.waiters);
  }
}

void init_barrier(uint32_t barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  cta->barriers[barrier] = {count, count};
}

void arrive(uint32_t barrier, uint32_t bytes, Cta& of) {
  Barrier& found = of.barriers.at(barrier);
  found.bytes += bytes;
  found.pending--;
  settle(found);
}

void wait_for_phase(uint32_t barrier, uint32_t parity) {
  Barrier& found = cta->barriers.at(barrier);
  wait([&found, parity] { return static_cast<uint32_t>(found.phase & 1) != parity; },
       &found.waiters);
}

void arrive_named(int number, int threads) {
  NamedBarrier& barrier = cta->named[number];
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  barrier.phase++;
  wake(barrier.waiters);
}

void sync_named(int number, int threads) {
  NamedBarrier& barrier = cta->named[number];
  const int phase = barrier.phase;
  arrive_named(number, threads);
  wait([&barrier, phase] { return barrier.phase != phase; }, &barrier.waiters);
}

void arrive_at_cluster() {
  Cluster& cluster = *cta->cluster;
  cta->running->cluster_phase = cluster.phase;
  cluster.arrived++;
  cluster.settle();
}

void wait_for_cluster() {
  Cluster& cluster = *cta->cluster;
  const int phase = cta->running->cluster_phase;
  wait([&cluster, phase] { return cluster.phase != phase; }, &cluster.waiters);
}

void multiply_later(std::function<void()> product) {
  cta->running->products.push_back(std::move(product));
}

void commit_products() {
  cta->running->groups.emplace_back(std::move(cta->running->products));
  cta->running->products.clear();
}

void multiply_all_but(size_t groups) {
  auto& pending = cta->running->groups;
  while (pending.size() > groups) {
    for (const auto& product : pending.front())
      product();
    pending.pop_front();
  }
}

}  // namespace emulator
