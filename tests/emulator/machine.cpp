// machine.cuh's functions, compiled once for all kernels.
#include "machine.cuh"

#include <algorithm>
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
std::vector<char> asleep;  // of all fibers

// Let a copy land after some turns; some copies are slow.
void launch(std::function<void()> land) {
  copies.emplace(turn + (random() % 8 ? random() % 8 : random() % 2000), std::move(land));
}

// The first fiber from `from` on that is not asleep, or `end` if there is none before that.
size_t awake_from(size_t from, size_t end) {
  const void* const found = std::memchr(asleep.data() + from, false, end - from);
  return found != nullptr ? static_cast<const char*>(found) - asleep.data() : end;
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
  cta->running->done = *cta->running->asleep = true;
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

void wait(std::function<bool()> ready, Waiters* waiters) {
  const bool is_ready = ready();
  if (is_ready && random() % 4) return;
  Fiber* const self = cta->running;
  self->ready = std::move(ready);
  if (waiters != nullptr && !is_ready) {
    waiters->push_back(self);
    *self->asleep = true;
  }
  self->context.leave();
}

void wake(Waiters& waiters) {
  for (const Fiber* const fiber : waiters)
    *fiber->asleep = false;
  waiters.clear();
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
  asleep.assign(indices.size() * threads, false);
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
      fiber.asleep = &asleep[fibers.size()];
      fibers.push_back(&fiber);
      fiber.cta = &block;
      fiber.waited_for_dependencies = complete;
      fiber.thread = i;
      fiber.ready = [] { return true; };
      fiber.context.start(enter);
    }
  }
  for (size_t left = fibers.size(); left > 0 && problem.empty(); turn++) {
    bool all_wait = true;
    const size_t none = 0, first = random() % fibers.size();
    for (const auto& [begin, end] : {std::pair(first, fibers.size()), std::pair(none, first)}) {
      for (size_t i = awake_from(begin, end); i < end && problem.empty();
           i = awake_from(i + 1, end)) {
        Fiber& fiber = *fibers[i];
        cta = fiber.cta;
        if (!fiber.ready()) continue;
        all_wait = false;
        if (random() % 8 == 0) continue;
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
    }
    if (all_wait && copies.empty()) fail("deadlock: all threads wait");
    if (all_wait && !copies.empty()) turn = std::max(turn, copies.begin()->first);
    for (; !copies.empty() && copies.begin()->first <= turn; copies.erase(copies.begin()))
      copies.begin()->second();
  }
  bool waits = pdl, stored_early = false;
  for (const Fiber* const fiber : fibers) {
    waits |= fiber->waited_for_dependencies;
    stored_early |= fiber->stored_early;
  }
  if (waits && stored_early) fail("global memory is written before the wait for predecessors");
  if (problem.empty() && !copies.empty()) fail("copies are in flight at the end");
  for (const auto& block : ctas) {
    const uint8_t* const guard = block->memory.data() + shared;  // whose bytes are all the same
    if (guard[0] != 0xff || std::memcmp(guard, guard + 1, kGuard - 1) != 0)
      fail("memory behind the shared memory is written");
  }
  return problem;
}

}  // namespace emulator
