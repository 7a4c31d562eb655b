// native/ptx.cuh for a host compiler: its instructions in terms of machine.cuh.
#pragma once

#include "cuda_words.cuh"
#include "ptx_tensor.cuh"

struct alignas(64) TensorMap {                        // as tests/emulated.py encodes it
  uint64_t address, rows, cols, box_rows, box_atoms;  // box_atoms: columns of a box in boxes_map
  uint64_t unused[11];
};

namespace emulator {

// Copies between shared memory and a box of the matrix of `map`, in boxes.cpp.
void load_box(const TensorMap& map, int x, int y, int z, uint32_t to, uint32_t barrier,
              uint16_t ctas);
void store_box(const TensorMap& map, int x, int y, uint32_t source);

}  // namespace emulator

namespace ptx {

using emulator::cta;

constexpr int kBoxDepth = 64;  // columns

inline uint32_t smem_address(const void* pointer) {
  const auto* const bytes = static_cast<const uint8_t*>(pointer);
  if (bytes >= cta->memory.data() && bytes <= cta->memory.data() + cta->memory.size()) {
    return static_cast<uint32_t>(bytes - cta->memory.data());
  }
  if (bytes < cta->fixed.data() || bytes >= cta->fixed.data() + cta->fixed.size()) {
    emulator::fail("the address of another CTA's or of no shared memory is taken");
  }
  return emulator::kStatic + static_cast<uint32_t>(bytes - cta->fixed.data());
}

inline bool elect_one() {
  __syncwarp();
  return cta->running->thread % emulator::kWarp == 0;
}

template <class Word>
Word opaque(Word value) {
  return value;
}

inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {
  return (word & mask) | bits;
}

inline uint32_t bytes_of(uint32_t word, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t number = selector >> 4 * i & 15, byte = word >> 8 * (number & 3) & 0xff;
    if (number & 4) continue;  // of a second word, which is 0
    result |= (number & 8 ? byte >> 7 ? 0xff : 0 : byte) << 8 * i;
  }
  return result;
}

inline uint32_t half_twice(uint32_t word, bool high) {
  return (high ? word >> 16 : word & 0xffff) * 0x10001;
}

inline uint4 load_chunk(uint32_t address) {
  uint4 words;
  std::memcpy(&words, emulator::at(address, sizeof words), sizeof words);
  return words;
}

inline void store_chunk(void* to, uint4 words) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof words) emulator::fail("a store is not aligned");
  std::memcpy(to, &words, sizeof words);
}

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  emulator::init_barrier(barrier, arrivals);
}

inline void mbarrier_arrive(uint32_t barrier) {
  emulator::arrive(barrier);
}

inline void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  emulator::arrive(barrier, 0, emulator::of_cluster(rank));
}

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulator::arrive(barrier, bytes);
}

inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_for_phase(barrier, parity);
  return true;
}

inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {
  emulator::fence();
}
inline void prefetch_tensor_map(const TensorMap*) {}
inline void launch_dependents() {}
inline void wait_for_dependencies() {
  cta->running->waited_for_dependencies = true;
}

inline void copy_chunk_or_zeros(uint32_t destination, const void* source, bool copies) {
  if (!cta->running->waited_for_dependencies)
    emulator::fail("data of a predecessor kernel is read before the wait");
  if (destination % 16 || reinterpret_cast<uintptr_t>(source) % 16) {
    emulator::fail("a copy is not of multiples of 16 bytes");
  }
  uint8_t* const to = emulator::at(destination, 16);
  std::memset(to, 0xff, 16);
  emulator::later(cta->running->copies, [=, of = cta, thread = cta->running] {
    emulator::written(*of, *thread, to, 16);
    if (copies) std::memcpy(to, source, 16);
    if (!copies) std::memset(to, 0, 16);
  });
}

inline void copy_chunk(uint32_t destination, const void* source) {
  copy_chunk_or_zeros(destination, source, true);
}

inline void commit_copies() {
  cta->running->copies.commit();
}
template <int groups>
void wait_for_copies() {
  emulator::wait_for(cta->running->copies, groups);
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

inline uint64_t l2_policy(bool once) {
  return once;
}

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

// With the 128-byte swizzle; elements outside the matrix are zero.
inline void tensor_load_multicast(uint32_t destination, const TensorMap* map, int x, int y, int z,
                                  uint32_t barrier, uint16_t ctas) {
  if (!cta->running->waited_for_dependencies)
    emulator::fail("X is read before the wait for predecessor kernels");
  if (destination % 1024) emulator::fail("a swizzled box is not aligned to 1 KiB");
  emulator::load_box(*map, x, y, z, destination, barrier, ctas);
}

inline void tensor_load(uint32_t destination, const TensorMap* map, int x, int y, int z,
                        uint32_t barrier) {
  tensor_load_multicast(destination, map, x, y, z, barrier, static_cast<uint16_t>(1 << cta->rank));
}

// With a swizzle as wide as a row of the box.
inline void tensor_store(const TensorMap* map, int x, int y, uint32_t source) {
  emulator::store_box(*map, x, y, source);
}

inline void commit_stores() {
  cta->running->stores.commit();
}
template <int groups>
void wait_for_reads() {
  emulator::wait_for(cta->running->stores, groups);
}
inline void wait_for_stores() {
  wait_for_reads<0>();
}

inline void store_release(int* to, int value) {
  *to = value;
}

inline int load_acquire(const int* from) {
  emulator::wait([from] { return *from != 0; });  // callers wait for a non-zero flag
  return *from;
}

inline int load_acquire_sys(const int* from) {
  return *static_cast<const volatile int*>(from);  // a thread of the test may write it
}

inline void store_release_sys(int* to, int value) {
  *static_cast<volatile int*>(to) = value;  // a thread of the test may read it
}

inline uint32_t cluster_size() {
  return static_cast<uint32_t>(cta->cluster->ctas.size());
}

inline uint32_t cluster_number() {
  return cta->index / cta->cluster->ctas.size();
}
inline uint32_t cluster_rank() {
  return cta->rank;
}

inline uint32_t in_cta(uint32_t address, uint32_t rank) {
  return address | rank + 1 << emulator::kCtaShift;
}

inline void store_in_cta(uint32_t there, float4 value, uint32_t barrier) {
  const uint32_t below = (1u << emulator::kCtaShift) - 1;
  if ((there ^ barrier) & ~below) emulator::fail("a store's barrier is in another CTA");
  emulator::copy(emulator::of_cluster((there >> emulator::kCtaShift) - 1), there & below,
                 barrier & below, sizeof value,
                 [=](uint8_t* to) { std::memcpy(to, &value, sizeof value); }, false);
}

inline void cluster_arrive() {
  __syncwarp();
  emulator::arrive_at_cluster();
}

inline void cluster_arrive_relaxed() {
  cluster_arrive();
}

inline void cluster_wait() {
  emulator::wait_for_cluster();
}

inline int atomic_add_acq_rel(int* to, int value) {
  return atomicAdd(to, value);
}

inline void fence_acq_rel() {}

inline const uint8_t* load_address(const uint64_t* from) {
  return reinterpret_cast<const uint8_t*>(*from);
}

inline void touch(const void* line) {
  if (*static_cast<const uint32_t*>(line) == 0x7fedcba9) std::abort();
}

template <class T>
void fetch_parameter(T) {}

template <class T>
T load_from_l2(const T* from) {
  return *from;
}

template <class T>
void store_to_l2(T* to, T value) {
  *to = value;
}

inline void spin() {
  emulator::wait([seen = emulator::global_stores] { return emulator::global_stores != seen; });
}

template <class T>
T load_from_l2_or_zero(const T* from, bool loads) {
  return loads ? *from : T{};
}

template <int registers>
void setmaxnreg_dec() {}

template <int registers>
void setmaxnreg_inc() {}

inline void named_barrier_arrive(int number, int threads) {
  emulator::arrive_named(number, threads);
}

inline void named_barrier_sync(int number, int threads) {
  emulator::sync_named(number, threads);
}

}  // namespace ptx

inline void __syncthreads() {
  ptx::named_barrier_sync(0, static_cast<int>(emulator::cta->fibers.size()));
}
