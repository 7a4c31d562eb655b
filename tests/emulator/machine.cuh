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
#include <string>
#include <vector>

#include "fiber.cuh"

// A function whose stores are the emulator's own, which stores.cpp need not see.
#define UNSEEN __attribute__((no_sanitize("kernel-address")))

namespace emulator {

constexpr uint32_t kStatic = 1 << 20;  // address of shared arrays of fixed size
constexpr size_t kFixed = 48 * 1024;   // bytes of all of them in a CTA
constexpr size_t kGuard = 64 * 1024;   // bytes behind shared memory that must stay unwritten
constexpr int kCtaShift =
    24;  // bits from here up in shared::cluster addresses: rank of the CTA, plus 1
constexpr int kWarp = 32;
constexpr uint32_t kChunk = 16;  // bytes of shared memory whose last writer is kept

struct Cta;
struct Fiber;
using Waiters = std::vector<Fiber*>;  // not asked again until what they wait for has changed

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

struct Fiber {  // what the scheduler asks of those that wait comes first, in one cache line
  std::function<bool()> ready;  // whether its wait is over
  Cta* cta;
  char* asleep;  // whether the scheduler passes it over: it is among waiters, or done
  uint32_t thread;
  bool done = false, waited_for_dependencies = false;
  bool stored_early = false;                    // to global memory, before it had waited
  int cluster_phase = -1;                       // of its last arrival at the cluster's barrier
  std::vector<std::function<void()>> products;  // wgmma not yet committed; committed groups
  std::deque<std::vector<std::function<void()>>> groups;
  std::vector<uint32_t> unfenced;  // chunks of shared memory it has written since its last fence
  Groups copies, stores;  // cp.async to shared memory; bulk stores from there
  Context context;
};

struct Barrier {
  int arrivals = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
  Waiters waiters = {};
};

struct NamedBarrier {
  int arrived = 0, phase = 0;
  Waiters waiters;
};

// Lanes of a warp that have reached a warp-wide instruction.
struct WarpSync {
  int arrived = 0, left = 0;
  const void* given[kWarp];
  void* taken[kWarp];
  Waiters waiters;
};

void wake(Waiters& waiters);

// CTAs of a cluster, and the threads that have arrived at its barrier.
struct Cluster {
  std::vector<Cta*> ctas;
  int arrived = 0, threads = 0, phase = 0;
  Waiters waiters;

  void settle() {
    if (arrived < threads || threads == 0) return;
    arrived = 0;
    phase++;
    wake(waiters);
  }
};

struct Cta {
  uint32_t index = 0, rank = 0;
  int left = 0;  // threads still running
  std::shared_ptr<Cluster> cluster;
  std::vector<uint8_t> memory;
  size_t shared = 0;
  std::vector<uint16_t> writers;  // of each chunk: the thread, plus 1, until its proxy fence
  std::vector<Fiber> fibers;
  Fiber* running = nullptr;
  std::map<uint32_t, Barrier> barriers;
  std::map<int, NamedBarrier> named;
  std::vector<WarpSync> warps;
  std::vector<uint8_t> fixed;            // shared arrays of fixed size
  std::map<const void*, size_t> places;  // by the key of their declaration
};

extern Cta* cta;       // that runs
extern bool in_fiber;  // whether a thread runs, and not the scheduler or what completes later

// Memory of the emulator's own, aligned to 64 bytes, and its end; also the end of malloc()'s.
void* take(size_t bytes);
void give(void* memory);

// A thread of CTA `of` writes shared memory through the generic proxy: a plain store, or cp.async.
void written(Cta& of, Fiber& thread, const void* to, size_t bytes);
// fence.proxy.async: the async proxy sees what the running thread has written.
void fence();
// An asynchronous operation touches shared memory: an error, unless its writers have fenced.
void touch_async(const Cta& of, uint32_t address, size_t bytes);
// Note that the running thread stores to global memory, now or asynchronously.
void global_store();
extern uint64_t global_stores;  // how often that was

// The running CTA's shared array of fixed size that `key` declares: NaN at first.
uint8_t* fixed(const void* key, size_t bytes);
template <class Array>
Array& fixed(const void* key) {
  return *reinterpret_cast<Array*>(fixed(key, sizeof(Array)));
}
// End the run with a message, unless it has one.
void fail(const std::string& found);
// Let the running fiber wait until `ready`, which only one who wakes `waiters` changes, if given.
void wait(std::function<bool()> ready, Waiters* waiters = nullptr);
// Raise an error, unless `bytes` at `address` are shared memory.
void check(uint32_t address, size_t bytes, const Cta& of);
// A CTA of the running cluster.
Cta& of_cluster(uint32_t rank);

inline uint8_t* at(uint32_t address, size_t bytes, Cta& of = *cta) {
  if (address >= kStatic && address - kStatic + bytes <= of.fixed.size())
    return of.fixed.data() + (address - kStatic);
  if (address + bytes > of.shared) check(address, bytes, of);
  return of.memory.data() + address;
}

// Called by all lanes of a warp; the last to arrive computes the results of all, by `compute`, of
// what they have given and by `function`.
using Compute = void(const void* const* given, void* const* taken, const void* function);
void together(const void* given, void* taken, Compute* compute, const void* function);

template <class Given, class Taken, class Function>
Taken together(const Given& given, Function function) {
  Taken taken;
  const auto compute = [](const void* const* all, void* const* of_all, const void* by) {
    (*static_cast<const Function*>(by))(reinterpret_cast<const Given* const*>(all),
                                        reinterpret_cast<Taken* const*>(of_all));
  };
  together(&given, &taken, compute, &function);
  return taken;
}

void settle(Barrier& barrier);

// mbarriers of shared memory and named barriers, by their addresses and numbers.
void init_barrier(uint32_t barrier, uint32_t arrivals);
void arrive(uint32_t barrier, uint32_t bytes = 0, Cta& of = *cta);
void wait_for_phase(uint32_t barrier, uint32_t parity);
void arrive_named(int number, int threads);
void sync_named(int number, int threads);
void arrive_at_cluster();
void wait_for_cluster();

// wgmma: a product of the running thread, which is computed when the thread waits for its group.
void multiply_later(std::function<void()> product);
void commit_products();
void multiply_all_but(size_t groups);

// Do `work` later, as part of the open group of the running thread.
void later(Groups& groups, std::function<void()> work);
void wait_for(const Groups& groups, size_t but_for);
// Start a copy to `to` in CTA `of`: NaN from now on, written by `land`, then counted at the
// barrier; `async`: through the async proxy.
void copy(Cta& of, uint32_t to, uint32_t barrier, uint32_t bytes,
          std::function<void(uint8_t*)> land, bool async = true);

// Run `kernel` in concurrent CTAs `indices` of the grid, in clusters of `cluster`, with `threads`
// fibers and `shared` bytes of shared memory each. Returns the error, or "". With `complete` the
// kernel's predecessors are complete before it waits for them; with `pdl` it must wait for them
// before it stores to global memory, as it must if any thread waits.
std::string run(const std::vector<uint32_t>& indices, int cluster, int threads, size_t shared,
                uint32_t seed, bool complete, bool pdl, std::function<void()> kernel);

}  // namespace emulator
