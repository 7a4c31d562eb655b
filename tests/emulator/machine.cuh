// Concurrent CTAs, their threads as fibers, and copies in flight.
//
// A fiber runs until it waits: for the rest of its warp, a barrier, or bytes. The fiber to resume
// and the time at which a copy lands are random, from a seed, so that each seed is another
// interleaving and copies overtake each other. The run ends with a message on a deadlock, on more
// arrivals than a barrier counts, and on copies that land after the end of their CTA, outside of
// shared memory, or in a CTA of the cluster that has ended. The destination of a copy is NaN from
// its start.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.cuh"

namespace emulator {

constexpr uint32_t kStatic = 1 << 20;  // address of shared arrays of fixed size
constexpr size_t kGuard = 64 * 1024;   // bytes behind shared memory that must stay unwritten
constexpr int kCtaShift =
    24;  // bits from here up in shared::cluster addresses: rank of the CTA, plus 1
constexpr int kWarp = 32;

struct Cta;

// Asynchronous operations of a thread: the number in flight of each group.
struct Groups {
  std::shared_ptr<int> open = std::make_shared<int>(0);
  std::deque<std::shared_ptr<int>> committed;

  void commit() {
    committed.push_back(open);
    open = std::make_shared<int>(0);
  }
  bool done(size_t but_for) const {
    for (size_t i = 0; i + but_for < committed.size(); i++)
      if (*committed[i] > 0) return false;
    return true;
  }
};

struct Fiber {
  Context context;
  Cta* cta;
  std::function<bool()> ready;  // whether its wait is over
  uint32_t thread;
  bool done = false, waited_for_dependencies = false;
  int cluster_phase = -1;                       // of its last arrival at the cluster's barrier
  std::vector<std::function<void()>> products;  // wgmma not yet committed; committed groups
  std::deque<std::vector<std::function<void()>>> groups;
  Groups copies, stores;  // cp.async to shared memory; bulk stores from there
};

struct Barrier {
  int arrivals = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
};

// Lanes of a warp that have reached a warp-wide instruction.
struct WarpSync {
  int arrived = 0, left = 0;
  const void* given[kWarp];
  void* taken[kWarp];
};

// CTAs of a cluster, and the threads that have arrived at its barrier.
struct Cluster {
  std::vector<Cta*> ctas;
  int arrived = 0, threads = 0, phase = 0;

  void settle() {
    if (arrived < threads || threads == 0) return;
    arrived = 0;
    phase++;
  }
};

struct Cta {
  uint32_t index = 0, rank = 0;
  int left = 0;  // threads still running
  std::shared_ptr<Cluster> cluster;
  std::vector<uint8_t> memory;
  size_t shared = 0;
  std::vector<Fiber> fibers;
  Fiber* running = nullptr;
  std::map<uint32_t, Barrier> barriers;
  std::map<int, std::pair<int, int>> named;  // arrived, phase
  std::vector<WarpSync> warps;
  const uint8_t* fixed = nullptr;
  std::set<void*> forgotten;
};

inline Cta* cta;
inline uint64_t turn;  // passes over all fibers so far
inline std::multimap<uint64_t, std::function<void()>>
    copies;  // in flight, by the turn they land in
inline std::mt19937 random;
inline std::string problem;

// Fill a shared array of fixed size with NaN, once per CTA.
inline void forget(void* memory, size_t bytes) {
  if (cta->forgotten.insert(memory).second) std::memset(memory, 0xff, bytes);
}

inline void fail(const std::string& found) {
  if (problem.empty()) problem = found;
}

inline void wait(std::function<bool()> ready) {
  if (ready() && random() % 4) return;
  Fiber* const self = cta->running;
  self->ready = std::move(ready);
  self->context.leave();
}

inline uint8_t* at(uint32_t address, size_t bytes, Cta& of = *cta) {
  if (address + bytes > of.shared) {
    throw std::out_of_range("shared memory at " + std::to_string(address));
  }
  return of.memory.data() + address;
}

inline Cta& of_cluster(uint32_t rank) {
  if (rank >= cta->cluster->ctas.size()) throw std::out_of_range("no such CTA in the cluster");
  Cta& found = *cta->cluster->ctas[rank];
  if (found.left == 0) fail("a CTA of the cluster is accessed after its end");
  return found;
}

inline void settle(Barrier& barrier) {
  if (barrier.pending < 0) fail("a barrier has more arrivals than it counts");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase++;
    barrier.pending = barrier.arrivals;
  }
}

// Called by all lanes of a warp; the last to arrive computes the results of all.
template <class Given, class Taken, class Function>
Taken together(const Given& given, Function compute) {
  const uint32_t thread = cta->running->thread;
  WarpSync& sync = cta->warps[thread / kWarp];
  Taken taken;
  wait([&sync] { return sync.left == 0; });  // all lanes have left the previous instruction
  sync.given[thread % kWarp] = &given;
  sync.taken[thread % kWarp] = &taken;
  if (++sync.arrived == kWarp) {
    compute(reinterpret_cast<const Given* const*>(sync.given),
            reinterpret_cast<Taken* const*>(sync.taken));
    sync.left = kWarp;
    sync.arrived = 0;
  } else {
    wait([&sync] { return sync.left > 0; });
  }
  sync.left--;
  return taken;
}

// Let a copy land after some turns; some copies are slow.
inline void launch(std::function<void()> land) {
  copies.emplace(turn + (random() % 8 ? random() % 8 : random() % 2000), std::move(land));
}

// Do `work` later, as part of the open group of the running thread.
inline void later(Groups& groups, std::function<void()> work) {
  Cta* const of = cta;
  const std::shared_ptr<int> group = groups.open;
  ++*group;
  launch([=] {
    if (of->left == 0) fail("an asynchronous operation of a CTA completes after its end");
    work();
    --*group;
  });
}

inline void wait_for(const Groups& groups, size_t but_for) {
  wait([&groups, but_for] { return groups.done(but_for); });
}

// Start a copy to `to` in CTA `of`: NaN from now on, written by `land`, then counted at the
// barrier.
inline void copy(Cta& of, uint32_t to, uint32_t barrier, uint32_t bytes,
                 std::function<void(uint8_t*)> land) {
  uint8_t* const memory = at(to, bytes, of);
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

inline thread_local std::function<void()> body;

inline void enter() {
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

// Run `kernel` in concurrent CTAs `indices` of the grid, in clusters of `cluster`, with `threads`
// fibers and `shared` bytes of shared memory each. Returns the error, or "". With `complete` the
// kernel's predecessors are complete before it waits for them.
inline std::string run(const std::vector<uint32_t>& indices, int cluster, int threads,
                       size_t shared, uint32_t seed, bool complete, std::function<void()> kernel) {
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
      fiber.context.resume();
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
  if (problem.empty() && !copies.empty()) fail("copies are in flight at the end");
  for (const auto& block : ctas) {
    for (size_t i = shared; i < block->memory.size(); i++) {
      if (block->memory[i] != 0xff) fail("memory behind the shared memory is written");
    }
  }
  return problem;
}

}  // namespace emulator
