// machine.cuh's functions, compiled once for all kernels.
#include "machine.cuh"

#include <memory>
#include <random>
#include <stdexcept>

#include "stores.cuh"

namespace emulator {

namespace {

uint64_t turn;  // passes over all fibers so far
std::multimap<uint64_t, std::function<void()>>
    copies;  // in flight, by the turn they land in
std::mt19937 random;
std::string problem;
std::function<void()> body;

// Let a copy land after some turns; some copies are slow.
void launch(std::function<void()> land) {
  copies.emplace(turn + (random() % 8 ? random() % 8 : random() % 2000), std::move(land));
}

void enter() {
  try {
    body();
  } catch (const std::exception& problem) {
    fail(problem.what());
  }
  if (cta->running->products.size() + cta->running->groups.size()) {
    fail("products are in flight at the end");
  }
  cta->running->done = true;
  cta->running->context.leave();
}

}  // namespace

Cta* cta;
bool in_fiber = false;

uint8_t* fixed(const void* key, size_t bytes) {
  const auto [place, is_new] = cta->places.try_emplace(key, cta->fixed.size());
  if (is_new) cta->fixed.resize(cta->fixed.size() + (bytes + 15) / 16 * 16, 0xff);
  if (cta->fixed.size() > kFixed) throw std::out_of_range("shared arrays of fixed size");
  return cta->fixed.data() + place->second;
}

void fail(const std::string& found) {
  if (problem.empty()) problem = found;
}

void wait(std::function<bool()> ready) {
  if (ready() && random() % 4) return;
  Fiber* const self = cta->running;
  self->ready = std::move(ready);
  self->context.leave();
}

void check(uint32_t address, size_t bytes, const Cta& of) {
  if (address + bytes > of.shared) {
    throw std::out_of_range("shared memory at " + std::to_string(address));
  }
}

Cta& of_cluster(uint32_t rank) {
  if (rank >= cta->cluster->ctas.size()) throw std::out_of_range("no such CTA in the cluster");
  Cta& found = *cta->cluster->ctas[rank];
  if (found.left == 0) fail("a CTA of the cluster is accessed after its end");
  return found;
}

void settle(Barrier& barrier) {
  if (barrier.pending < 0) fail("a barrier has more arrivals than it counts");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase++;
    barrier.pending = barrier.arrivals;
  }
}

void later(Groups& groups, std::function<void()> work) {
  Cta* const of = cta;
  const std::shared_ptr<int> group = groups.open;
  ++*group;
  launch([=] {
    if (of->left == 0) fail("an asynchronous operation of a CTA completes after its end");
    work();
    --*group;
  });
}

void wait_for(const Groups& groups, size_t but_for) {
  wait([&groups, but_for] { return groups.done(but_for); });
}

void copy(Cta& of, uint32_t to, uint32_t barrier, uint32_t bytes,
                 std::function<void(uint8_t*)> land, bool async) {
  uint8_t* const memory = at(to, bytes, of);
  if (async) touch_async(of, to, bytes);
  if (of.barriers.count(barrier) == 0) fail("a copy names no barrier");
  std::memset(memory, 0xff, bytes);
  launch([=, &of] {
    if (of.left == 0) fail("a copy lands in a CTA that has ended");
    land(memory);
    Barrier& found = of.barriers[barrier];
    found.bytes -= bytes;
    settle(found);
  });
}

std::string run(const std::vector<uint32_t>& indices, int cluster, int threads,
                       size_t shared, uint32_t seed, bool complete, bool pdl,
                       std::function<void()> kernel) {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Fiber*> fibers;
  turn = 0;
  copies.clear();
  problem.clear();
  random.seed(seed);
  body = std::move(kernel);
  for (const uint32_t index : indices) {
    Cta& block = *ctas.emplace_back(std::make_unique<Cta>());
    block.index = index;
    block.rank = index % cluster;
    if ((ctas.size() - 1) % cluster == 0) {
      block.cluster = std::make_shared<Cluster>();
      block.cluster->ctas.resize(cluster);
    } else {
      block.cluster = ctas[ctas.size() - 2]->cluster;
    }
    block.cluster->ctas[block.rank] = &block;
    block.cluster->threads += threads;
    block.left = threads;
    block.shared = shared;
    block.fixed.reserve(kFixed);
    block.writers.assign(shared / kChunk + 1, 0);
    block.memory.assign(shared + kGuard, 0xff);
    block.warps.resize((threads + kWarp - 1) / kWarp);
    block.fibers.resize(threads);
    for (int i = 0; i < threads; i++) {
      Fiber& fiber = block.fibers[i];
      fibers.push_back(&fiber);
      fiber.cta = &block;
      fiber.waited_for_dependencies = complete;
      fiber.thread = i;
      fiber.ready = [] { return true; };
      fiber.context.start(enter);
    }
  }
  for (size_t left = fibers.size(); left > 0 && problem.empty();) {
    bool moved = false;
    const size_t first = random() % fibers.size();
    for (size_t i = 0; i < fibers.size() && problem.empty(); i++) {
      Fiber& fiber = *fibers[(first + i) % fibers.size()];
      if (fiber.done) continue;
      cta = fiber.cta;
      if (!fiber.ready() || random() % 8 == 0) continue;
      moved = true;
      cta->running = &fiber;
      in_fiber = true;
      fiber.context.resume();
      in_fiber = false;
      if (!fiber.done) continue;
      left--;
      cta->left--;
      cta->cluster->threads--;
      if (fiber.cluster_phase == cta->cluster->phase) cta->cluster->arrived--;
      cta->cluster->settle();
    }
    for (; !copies.empty() && copies.begin()->first <= turn; copies.erase(copies.begin()))
      copies.begin()->second();
    turn++;
    if (!moved && copies.empty()) {
      bool stuck = true;  // unless a fiber that is ready was skipped at random
      for (Fiber* const fiber : fibers) {
        cta = fiber->cta;
        stuck &= fiber->done || !fiber->ready();
      }
      if (stuck) fail("deadlock: all threads wait");
    }
  }
  bool waits = pdl, stored_early = false;
  for (const Fiber* const fiber : fibers) {
    waits |= fiber->waited_for_dependencies;
    stored_early |= fiber->stored_early;
  }
  if (waits && stored_early) fail("global memory is written before the wait for predecessors");
  if (problem.empty() && !copies.empty()) fail("copies are in flight at the end");
  for (const auto& block : ctas) {
    for (size_t i = shared; i < block->memory.size(); i++) {
      if (block->memory[i] != 0xff) fail("memory behind the shared memory is written");
    }
  }
  return problem;
}

}  // namespace emulator
