// native/ptx.cuh for a host compiler: the threads of some CTAs at a time as fibers.
//
// A fiber runs until it waits: for the rest of its warp, a barrier, or bytes. Which one goes on,
// and which copy lands, is drawn at random from a seed, so that other seeds are other
// interleavings, and copies overtake each other. What no interleaving may do ends the run with a
// message: waiting for ever, more arrivals than a barrier counts, copies that land after the end,
// or outside of shared memory, or what reaches another CTA of the cluster that has ended. What a
// copy will overwrite is NaN from when it starts.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "fiber.cuh"

struct alignas(64) TensorMap {  // as tests/emulator.py writes it
  uint64_t address, rows, cols, box_rows, box_atoms;
  uint64_t unused[11];
};

namespace emulator {

constexpr uint32_t kStatic = 1 << 20;  // where shared arrays of fixed size have their addresses
constexpr size_t kGuard = 64 * 1024;   // bytes behind shared memory that nobody may write
constexpr int kCtaShift = 24;  // above, in addresses of the cluster's CTAs, their ranks and one
constexpr int kWarp = 32;
constexpr int kBoxDepth = 64;

struct Cta;

struct Fiber {
  Context context;
  Cta* cta;
  std::function<bool()> ready;  // whether what it waits for has come
  uint32_t thread;
  bool done = false, waited_for_dependencies = false;
  int cluster_phase = -1;  // of the cluster's barrier, that it has arrived in
  std::vector<std::function<void()>> products;  // of wgmma, and those committed, group by group
  std::deque<std::vector<std::function<void()>>> groups;
};

struct Barrier {
  int arrivals = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
};

struct Copy {
  int turns;  // until it lands; of all fibers
  std::function<void()> land;
};

// Lanes of a warp that have come to an instruction that all take part in.
struct Meeting {
  int arrived = 0, left = 0;
  const void* given[kWarp];
  void* taken[kWarp];
};

// CTAs that run beside each other, and threads of theirs that have come to the clusters' barrier.
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
  int left = 0;  // threads that have not ended
  std::shared_ptr<Cluster> cluster;
  std::vector<uint8_t> memory;
  size_t shared = 0;
  std::vector<Fiber> fibers;
  Fiber* running = nullptr;
  std::map<uint32_t, Barrier> barriers;
  std::map<int, std::pair<int, int>> named;  // arrived, phase
  std::vector<Meeting> meetings;
  const uint8_t* fixed = nullptr;
  std::set<void*> forgotten;
};

inline Cta* cta;
inline std::vector<Copy> copies;
inline std::mt19937 random;
inline std::string problem;

// Shared memory of fixed size, which a CTA finds full of NaN.
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
  if (found.left == 0) fail("what reaches another CTA finds that it has ended");
  return found;
}

inline void settle(Barrier& barrier) {
  if (barrier.pending < 0) fail("a barrier has more arrivals than it counts");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase++;
    barrier.pending = barrier.arrivals;
  }
}

// The whole warp comes here; the last lane computes for all of them.
template <class Given, class Taken, class Function>
Taken together(const Given& given, Function compute) {
  const uint32_t thread = cta->running->thread;
  Meeting& meeting = cta->meetings[thread / kWarp];
  Taken taken;
  wait([&meeting] { return meeting.left == 0; });  // all have left the meeting before
  meeting.given[thread % kWarp] = &given;
  meeting.taken[thread % kWarp] = &taken;
  if (++meeting.arrived == kWarp) {
    compute(reinterpret_cast<const Given* const*>(meeting.given),
            reinterpret_cast<Taken* const*>(meeting.taken));
    meeting.left = kWarp;
    meeting.arrived = 0;
  } else {
    wait([&meeting] { return meeting.left > 0; });
  }
  meeting.left--;
  return taken;
}

// From now on `to`, of CTA `of`, is NaN; `land` puts there what it then has, and a barrier knows.
inline void copy(Cta& of, uint32_t to, uint32_t barrier, uint32_t bytes,
                 std::function<void(uint8_t*)> land) {
  uint8_t* const memory = at(to, bytes, of);
  if (of.barriers.count(barrier) == 0) fail("a copy names no barrier");
  std::memset(memory, 0xff, bytes);
  const int turns = random() % 8 ? random() % 8 : random() % 2000;  // some are slow
  copies.push_back({turns, [=, &of] {
                      if (of.left == 0) fail("a copy lands in a CTA that has ended");
                      land(memory);
                      Barrier& found = of.barriers[barrier];
                      found.bytes -= bytes;
                      settle(found);
                    }});
}

inline thread_local std::function<void()> body;

inline void enter() {
  try {
    body();
  } catch (const std::exception& problem) {
    fail(problem.what());
  }
  if (cta->running->products.size() + cta->running->groups.size()) {
    fail("products are under way at the end");
  }
  cta->running->done = true;
  cta->running->context.leave();
}

// Runs `kernel` in CTAs beside each other, clusters of `cluster` of them, which are all that there
// are or some of them, each `threads` fibers with `shared` bytes of shared memory; what went wrong,
// or "". With `complete` what the kernel depends on is, before it waits for that.
inline std::string run(const std::vector<uint32_t>& indices, int cluster, int threads,
                       size_t shared, uint32_t seed, bool complete, std::function<void()> kernel) {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Fiber*> fibers;
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
    block.meetings.resize((threads + kWarp - 1) / kWarp);
    block.fibers.resize(threads);
    for (int i = 0; i < threads; i++) {
      Fiber& fiber = block.fibers[i];
      fibers.push_back(&fiber);
      fiber.cta = &block;
      fiber.waited_for_dependencies = complete;
      fiber.thread = i;
      fiber.ready = [] { return true; };
      fiber.context.begin_with(enter);
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
      fiber.context.go_on();
      if (!fiber.done) continue;
      left--;
      cta->left--;
      cta->cluster->threads--;
      if (fiber.cluster_phase == cta->cluster->phase) cta->cluster->arrived--;  // and is not to wait
      cta->cluster->settle();
    }
    for (size_t i = 0; i < copies.size();) {
      if (copies[i].turns-- > 0) {
        i++;
        continue;
      }
      const Copy landing = copies[i];
      copies.erase(copies.begin() + static_cast<long>(i));
      landing.land();
    }
    if (!moved && copies.empty()) {
      bool stuck = true;  // nobody can go on, unless it was left out by chance
      for (Fiber* const fiber : fibers) {
        cta = fiber->cta;
        stuck &= fiber->done || !fiber->ready();
      }
      if (stuck) fail("all threads wait for ever");
    }
  }
  if (problem.empty() && !copies.empty()) fail("copies are under way at the end");
  for (const auto& block : ctas) {
    for (size_t i = shared; i < block->memory.size(); i++) {
      if (block->memory[i] != 0xff) fail("memory behind the shared memory is written");
    }
  }
  return problem;
}

}  // namespace emulator

// Words of CUDA C++ that name the running thread and its CTA.
struct BlockIndex {
  struct {
    operator uint32_t() const { return emulator::cta->index; }
  } x;
};
inline BlockIndex blockIdx;
struct ThreadIndex {
  struct {
    operator uint32_t() const { return emulator::cta->running->thread; }
  } x;
};
inline ThreadIndex threadIdx;

inline void __threadfence() {}

inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}

inline void __syncwarp() {
  emulator::together<int, int>(0, [](const int* const*, int* const*) {});
}

template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  struct Given {
    T value;
    int lane;
  };
  return emulator::together<Given, T>({value, lane},
                                      [](const Given* const* given, T* const* taken) {
                                        for (int i = 0; i < emulator::kWarp; i++) {
                                          *taken[i] = given[given[i]->lane]->value;
                                        }
                                      });
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  return emulator::together<bool, uint32_t>(
      value, [](const bool* const* given, uint32_t* const* taken) {
        uint32_t all = 0;
        for (int i = 0; i < emulator::kWarp; i++)
          all |= static_cast<uint32_t>(*given[i]) << i;
        for (int i = 0; i < emulator::kWarp; i++)
          *taken[i] = all;
      });
}

inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}

inline int __ffs(uint32_t bits) {
  return __builtin_ffs(bits);
}

template <class T>
T __shfl_xor_sync(uint32_t all, T value, int mask) {
  return __shfl_sync(all, value, static_cast<int>(threadIdx.x % emulator::kWarp) ^ mask);
}

namespace ptx {

using emulator::cta;

inline uint32_t smem_address(const void* pointer) {
  const auto* const bytes = static_cast<const uint8_t*>(pointer);
  if (bytes >= cta->memory.data() && bytes <= cta->memory.data() + cta->memory.size()) {
    return static_cast<uint32_t>(bytes - cta->memory.data());
  }
  if (cta->fixed == nullptr) cta->fixed = bytes;
  return emulator::kStatic + static_cast<uint32_t>(bytes - cta->fixed);
}

inline bool elect_one() {
  __syncwarp();
  return cta->running->thread % emulator::kWarp == 0;
}

template <class Word>
Word anew(Word value) {
  return value;
}

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  cta->barriers[barrier] = {count, count};
}

inline void mbarrier_arrive(uint32_t barrier) {
  emulator::Barrier& found = cta->barriers.at(barrier);
  found.pending--;
  emulator::settle(found);
}

inline void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  emulator::Barrier& found = emulator::of_cluster(rank).barriers.at(barrier);
  found.pending--;
  emulator::settle(found);
}

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulator::Barrier& found = cta->barriers.at(barrier);
  found.bytes += bytes;
  found.pending--;
  emulator::settle(found);
}

inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  const emulator::Barrier& found = cta->barriers.at(barrier);
  emulator::wait([&found, parity] { return static_cast<uint32_t>(found.phase & 1) != parity; });
  return true;
}

inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void prefetch_tensor_map(const TensorMap*) {}
inline void launch_dependents() {}
inline void wait_for_dependencies() {
  cta->running->waited_for_dependencies = true;
}

inline void check_bulk(uint32_t destination, const void* source, uint32_t bytes) {
  if (destination % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16 || bytes == 0) {
    emulator::fail("a bulk copy is not of multiples of 16 bytes");
  }
}

inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  check_bulk(destination, source, bytes);
  emulator::copy(*cta, destination, barrier, bytes,
                 [=](uint8_t* to) { std::memcpy(to, source, bytes); });
}

inline void bulk_load_once(uint32_t destination, const void* source, uint32_t bytes,
                           uint32_t barrier) {
  bulk_load(destination, source, bytes, barrier);
}

inline uint64_t l2_policy(bool once) { return once; }

inline void bulk_load_kept(uint32_t destination, const void* source, uint32_t bytes,
                           uint32_t barrier, uint64_t) {
  bulk_load(destination, source, bytes, barrier);
}
inline void prefetch(const void*) {}

inline void bulk_prefetch(const void* source, uint32_t bytes) {
  check_bulk(0, source, bytes);
  const volatile uint8_t* const from = static_cast<const uint8_t*>(source);
  for (uint32_t i = 0; i < bytes; i++)
    (void)from[i];
}

inline float exp2(float value) {
  return value < -126.0f ? 0.0f : exp2f(value);
}

inline uint64_t globaltimer() {
  static uint64_t ns = 0;
  return ns += 100;
}

inline void sleep(uint32_t) {
  emulator::wait([] { return true; });
}

inline void bulk_load_multicast(uint32_t destination, const void* source, uint32_t bytes,
                                uint32_t barrier, uint16_t ctas) {
  check_bulk(destination, source, bytes);
  for (uint32_t rank = 0; rank < 16; rank++) {
    if (ctas >> rank & 1) {
      emulator::copy(emulator::of_cluster(rank), destination, barrier, bytes,
                     [=](uint8_t* to) { std::memcpy(to, source, bytes); });
    }
  }
}

// With the swizzle of 128 bytes; what a box has beyond the matrix is zero.
inline void tensor_load_multicast(uint32_t destination, const TensorMap* map, int x, int y, int z,
                                  uint32_t barrier, uint16_t ctas) {
  if (!cta->running->waited_for_dependencies) emulator::fail("X is read before it is complete");
  if (destination % 1024) emulator::fail("a swizzled box is not aligned to 1 KiB");
  const TensorMap box = *map;
  const uint32_t bytes = static_cast<uint32_t>(box.box_atoms * box.box_rows) * 128;
  const auto land = [=](uint8_t* to) {
    const auto* const elements = reinterpret_cast<const uint16_t*>(box.address);
    for (uint64_t atom = 0; atom < box.box_atoms; atom++) {
      for (uint64_t row = 0; row < box.box_rows; row++) {
        for (uint64_t i = 0; i < emulator::kBoxDepth; i++) {
          const uint64_t col = (z + atom) * emulator::kBoxDepth + x + i, of = y + row;
          const uint16_t value =
              of < box.rows && col < box.cols ? elements[of * box.cols + col] : 0;
          const uint64_t chunk = i / 8 ^ row % 8;
          std::memcpy(to + (atom * box.box_rows + row) * 128 + chunk * 16 + i % 8 * 2, &value, 2);
        }
      }
    }
  };
  for (uint32_t rank = 0; rank < 16; rank++) {
    if (ctas >> rank & 1)
      emulator::copy(emulator::of_cluster(rank), destination, barrier, bytes, land);
  }
}

inline void tensor_load(uint32_t destination, const TensorMap* map, int x, int y, int z,
                        uint32_t barrier) {
  tensor_load_multicast(destination, map, x, y, z, barrier, static_cast<uint16_t>(1 << cta->rank));
}

inline void store_release(int* to, int value) {
  *to = value;
}

inline int load_acquire(const int* from) {
  emulator::wait([from] { return *from != 0; });  // that is what is waited for
  return *from;
}

inline uint32_t cluster_size() {
  return static_cast<uint32_t>(cta->cluster->ctas.size());
}

inline uint32_t cluster_number() { return cta->index / cta->cluster->ctas.size(); }
inline uint32_t cluster_rank() {
  return cta->rank;
}

inline uint32_t in_cta(uint32_t address, uint32_t rank) {
  return address | rank + 1 << emulator::kCtaShift;
}

inline void store_in_cta(uint32_t there, float4 value) {
  emulator::Cta& to = emulator::of_cluster((there >> emulator::kCtaShift) - 1);
  const uint32_t address = there & (1u << emulator::kCtaShift) - 1;
  std::memcpy(emulator::at(address, sizeof value, to), &value, sizeof value);
}

inline void cluster_arrive() {
  __syncwarp();
  emulator::Cluster& cluster = *cta->cluster;
  cta->running->cluster_phase = cluster.phase;
  cluster.arrived++;
  cluster.settle();
}

inline void cluster_arrive_relaxed() {
  cluster_arrive();
}

inline void cluster_wait() {
  const emulator::Cluster& cluster = *cta->cluster;
  const int phase = cta->running->cluster_phase;
  emulator::wait([&cluster, phase] { return cluster.phase != phase; });
}

inline int add_in_order(int* to, int value) {
  return atomicAdd(to, value);
}

inline void touch(const float2* line) {
  if (std::isnan(line->x)) std::abort();
}

template <class T>
void fetch_parameter(T) {}

template <class T>
T load_from_l2(const T* from) {
  return *from;
}

inline float4 load_from_l2_or_zero(const float4* from, bool loads) {
  return loads ? *from : float4{};
}

template <int registers>
void keep_registers() {}

template <int registers>
void take_registers() {}

// What the lanes have of four 8x8 matrices whose rows they give the addresses of.
inline void load_matrices(uint32_t (&fragment)[4], uint32_t address, bool transposed) {
  struct Taken {
    uint16_t elements[4][2];
  };
  const Taken taken = emulator::together<uint32_t, Taken>(
      address, [transposed](const uint32_t* const* given, Taken* const* lanes) {
        for (int number = 0; number < 4 * emulator::kWarp * 2; number++) {
          const int matrix = number / 64, lane = number / 2 % 32, i = number % 2;
          const int row = transposed ? lane % 4 * 2 + i : lane / 4;
          const int col = transposed ? lane / 4 : lane % 4 * 2 + i;
          const uint32_t from = *given[8 * matrix + row];
          if (from % 16) emulator::fail("a row of a matrix is not aligned to 16 bytes");
          std::memcpy(&lanes[lane]->elements[matrix][i], emulator::at(from, 16) + 2 * col, 2);
        }
      });
  std::memcpy(fragment, taken.elements, sizeof fragment);
}

inline void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  load_matrices(fragment, address, false);
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
  load_matrices(fragment, address, true);
}

inline void store_matrices(uint32_t address, const uint32_t (&fragment)[4], bool transposed) {
  struct Given {
    uint32_t address;
    bool transposed;
    uint16_t elements[4][2];
  };
  Given own = {address, transposed};
  std::memcpy(own.elements, fragment, sizeof fragment);
  emulator::together<Given, int>(own, [](const Given* const* given, int* const*) {
    for (int number = 0; number < 4 * emulator::kWarp * 2; number++) {
      const int matrix = number / 64, lane = number / 2 % 32, i = number % 2;
      int row = lane / 4, col = lane % 4 * 2 + i;
      if (given[lane]->transposed) std::swap(row, col);
      const uint32_t to = given[8 * matrix + row]->address;
      if (to % 16) emulator::fail("a row of a matrix is not aligned to 16 bytes");
      std::memcpy(emulator::at(to, 16) + 2 * col, &given[lane]->elements[matrix][i], 2);
    }
  });
}

inline void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4]) {
  store_matrices(address, fragment, false);
}

inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4]) {
  store_matrices(address, fragment, true);
}

inline uint32_t movmatrix_trans(uint32_t fragment) {
  return emulator::together<uint32_t, uint32_t>(
      fragment, [](const uint32_t* const* given, uint32_t* const* taken) {
        for (int lane = 0; lane < emulator::kWarp; lane++) {
          uint16_t pair[2];
          for (int i = 0; i < 2; i++) {
            const int row = lane % 4 * 2 + i, col = lane / 4;
            pair[i] = static_cast<uint16_t>(*given[4 * row + col / 2] >> 16 * (col % 2));
          }
          std::memcpy(taken[lane], pair, 4);
        }
      });
}

inline float to_float(uint16_t bits, __half) {
  return __half2float({bits});
}
inline float to_float(uint16_t bits, __nv_bfloat16) {
  return __bfloat162float({bits});
}

// Rows 0 to 7 of the sums are in `low`, 8 to 15 in `high`.
template <class Element>
void mma(float2& low, float2& high, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Element) {
  struct Given {
    float sums[4];
    uint32_t a[4], b[2];
  };
  struct Taken {
    float sums[4];
  };
  const Given own = {{low.x, low.y, high.x, high.y}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Taken taken =
      emulator::together<Given, Taken>(own, [](const Given* const* given, Taken* const* lanes) {
        float w[16][16], x[16][8];
        auto half = [](uint32_t word, int upper) {
          return to_float(static_cast<uint16_t>(word >> 16 * upper), Element());
        };
        for (int lane = 0; lane < emulator::kWarp; lane++) {
          const int g = lane / 4, t = lane % 4;
          for (int i = 0; i < 2; i++) {
            for (int part = 0; part < 4; part++) {
              w[g + part % 2 * 8][2 * t + i + part / 2 * 8] = half(given[lane]->a[part], i);
            }
            for (int part = 0; part < 2; part++) {
              x[2 * t + i + part * 8][g] = half(given[lane]->b[part], i);
            }
          }
        }
        for (int lane = 0; lane < emulator::kWarp; lane++) {
          for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            float sum = given[lane]->sums[i];
            for (int k = 0; k < 16; k++)
              sum += w[row][k] * x[k][col];
            lanes[lane]->sums[i] = sum;
          }
        }
      });
  low = {taken.sums[0], taken.sums[1]};
  high = {taken.sums[2], taken.sums[3]};
}

inline void named_barrier_arrive(int number, int threads) {
  auto& [arrived, phase] = cta->named[number];
  if (++arrived < threads) return;
  arrived = 0;
  phase++;
}

inline void named_barrier_sync(int number, int threads) {
  const int& phase = cta->named[number].second;
  const int mine = phase;
  named_barrier_arrive(number, threads);
  emulator::wait([&phase, mine] { return phase != mine; });
}

template <class Element>
uint32_t max_nan(uint32_t a, uint32_t b, Element of) {
  uint32_t larger = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto first = static_cast<uint16_t>(a >> shift), second = static_cast<uint16_t>(b >> shift);
    const float x = to_float(first, of), y = to_float(second, of);
    const bool takes_first = x > y || (x == y && !std::signbit(x));
    const uint32_t bits = std::isnan(x) || std::isnan(y) ? 0x7fff : takes_first ? first : second;
    larger |= bits << shift;
  }
  return larger;
}

}  // namespace ptx

inline void __syncthreads() {
  ptx::named_barrier_sync(0, static_cast<int>(emulator::cta->fibers.size()));
}

struct BlockSize {
  struct {
    operator uint32_t() const { return static_cast<uint32_t>(emulator::cta->fibers.size()); }
  } x;
};
inline BlockSize blockDim;
