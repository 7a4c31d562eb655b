// Asynchronous copies between global and shared memory, most of them by TMA.
#pragma once

#include "hardware.cuh"
#include "ptx_words.cuh"

// State space of the destination of a CTA's own copies.
#if CLUSTERS
#define BULK_SHARED "shared::cluster"
#else
#define BULK_SHARED "shared::cta"
#endif

namespace ptx {

// Copy 16 bytes; both addresses are multiples of 16.
__device__ __forceinline__ void copy_chunk(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}

// Copy 16 bytes, or write zeros where not `copies`; nothing is read then.
__device__ __forceinline__ void copy_chunk_or_zeros(uint32_t destination, const void* source,
                                                    bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(copies ? 16 : 0)
               : "memory");
}

// Close the group of copies started since the last call; it may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until all but the last `groups` groups are complete.
template <int groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Bulk copies from global to shared memory; both addresses and `bytes` are multiples of 16.

__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk." BULK_SHARED
      ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// L2 eviction policy: evict-first for data that is read `once`, else normal.
__device__ __forceinline__ uint64_t l2_policy(bool once) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(normal));
  return once ? first : normal;
}

// Bulk load with an L2 policy from l2_policy().
__device__ __forceinline__ void bulk_load_kept(uint32_t destination, const void* source,
                                               uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk." BULK_SHARED
      ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Bulk load of bytes that are not read again (evict-first in L2).
__device__ __forceinline__ void bulk_load_once(uint32_t destination, const void* source,
                                               uint32_t bytes, uint32_t barrier) {
  bulk_load_kept(destination, source, bytes, barrier, l2_policy(true));
}

// Bulk load to the same offset in every CTA of the cluster whose bit is set in `ctas`. Each of them
// gets the bytes counted at its own barrier of the same offset.
__device__ __forceinline__ void bulk_load_multicast(uint32_t destination, const void* source,
                                                    uint32_t bytes, uint32_t barrier,
                                                    uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "h"(ctas)
      : "memory");
}

// Prefetch bytes to L2.
__device__ __forceinline__ void bulk_prefetch(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Load the box at element (x, y, z) of a 3-D tensor map. `map` is a kernel parameter or in global
// memory.
__device__ __forceinline__ void tensor_load(uint32_t destination, const TensorMap* map, int x,
                                            int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d." BULK_SHARED
      ".global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Load a box to the same offset in every CTA of the cluster whose bit is set in `ctas`.
__device__ __forceinline__ void tensor_load_multicast(uint32_t destination, const TensorMap* map,
                                                      int x, int y, int z, uint32_t barrier,
                                                      uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ctas)
      : "memory");
}

// Store from shared memory to the box at element (x, y) of a 2-D tensor map; elements outside the
// tensor are skipped.
__device__ __forceinline__ void tensor_store(const TensorMap* map, int x, int y, uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(source)
      : "memory");
}

// Close the group of stores started since the last call; it may be empty.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Wait until all but the last `groups` groups of stores have read their shared memory.
template <int groups>
__device__ __forceinline__ void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

// Wait until all stores are complete.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace ptx
