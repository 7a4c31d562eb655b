// Copies between global and shared memory, most of them by the tensor memory accelerator.
#pragma once

#include "ptx_words.cuh"

namespace ptx {

// Copies 16 bytes, both of whose addresses are multiples of that.
__device__ __forceinline__ void copy_chunk(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}

// Those that the thread has begun since the last time are a group, of which there may be none.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all of them are complete but for so many groups, the last ones.
template <int groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Bulk copies from global to shared memory; both addresses and `bytes` are multiples of 16.

__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// How L2 keeps what is read: nothing reads it again, so that it goes before all else, or any.
__device__ __forceinline__ uint64_t l2_policy(bool once) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(normal));
  return once ? first : normal;
}

// The same, to be kept by L2 as `policy` says.
__device__ __forceinline__ void bulk_load_kept(uint32_t destination, const void* source,
                                               uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for bytes that nothing reads again.
__device__ __forceinline__ void bulk_load_once(uint32_t destination, const void* source,
                                               uint32_t bytes, uint32_t barrier) {
  bulk_load_kept(destination, source, bytes, barrier, l2_policy(true));
}

// The same bytes to the same offset in every CTA of the cluster whose bit is set in `ctas`; each
// of them has its own barrier at the same offset completed.
__device__ __forceinline__ void bulk_load_multicast(uint32_t destination, const void* source,
                                                    uint32_t bytes, uint32_t barrier,
                                                    uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "h"(ctas)
      : "memory");
}

// Has bytes brought to L2, for whoever reads them next.
__device__ __forceinline__ void bulk_prefetch(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// A box of a 3-D tensor map at element (x, y, z); `map` is a kernel parameter or in global memory.
__device__ __forceinline__ void tensor_load(uint32_t destination, const TensorMap* map, int x,
                                            int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same box to the same offset in every CTA of the cluster whose bit is set in `ctas`.
__device__ __forceinline__ void tensor_load_multicast(uint32_t destination, const TensorMap* map,
                                                      int x, int y, int z, uint32_t barrier,
                                                      uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ctas)
      : "memory");
}

// From shared memory to a box of a 2-D tensor map at element (x, y), but for what lies beyond.
__device__ __forceinline__ void tensor_store(const TensorMap* map, int x, int y, uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(source)
      : "memory");
}

// Those that the thread has begun since the last time are a group, of which there may be none.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until shared memory is read no more but by so many groups, the last ones.
template <int groups>
__device__ __forceinline__ void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

// Until all of them are complete.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace ptx
