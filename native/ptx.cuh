// PTX instructions that CUDA C++ has no word for, one a function (PTX ISA 8.x, sections 9.7.9
// to 9.7.13). Shared memory is addressed by 32 bits, as the instructions do it: smem_address()
// makes an address, once, as that costs more than the arithmetic on it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

// CUtensorMap of the driver's API, which NVRTC has no header for.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

namespace ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// True in one thread of a warp, all of which come here; the compiler then knows it is one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected;
}

// The same value, which the compiler takes for another one: what is reckoned from it in a loop is
// then not reckoned ahead, to stay in registers throughout.
template <class Word>
__device__ __forceinline__ Word anew(Word value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// mbarriers

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// True once the phase of the given parity is complete; waits for a while in hardware before false.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Arrives at the barrier at the same shared-memory offset of CTA `rank` of the cluster, for one
// that has read what others overwrite: what it has written they need not see, which would cost a
// fence.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Has a line brought to L1.
__device__ __forceinline__ void prefetch(const void* line) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(line) : "memory");
}

// What another SM wrote, if fences put it before; caches of this SM are passed by.
__device__ __forceinline__ float4 load_from_l2(const float4* from) {
  float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

// The same, or zeros, without a branch.
__device__ __forceinline__ float4 load_from_l2_or_zero(const float4* from, bool loads) {
  float4 value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\nmov.f32 %0, 0f00000000;\n"
      "mov.f32 %1, 0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n"
      "@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "l"(from), "r"(static_cast<int>(loads))
      : "memory");
  return value;
}

// Has a line brought to L1, so that reading it soon takes no time. Loads that nothing depends on
// are dropped, so a NaN that is in no table would end the kernel.
__device__ __forceinline__ void touch(const float2* line) {
  asm volatile(
      "{\n"
      ".reg .b32 value;\n"
      ".reg .pred never;\n"
      "ld.global.b32 value, [%0];\n"
      "setp.eq.u32 never, value, 0x7fedcba9;\n"
      "@never trap;\n"
      "}" ::"l"(line)
      : "memory");
}

// Reads a parameter of the kernel here and not later: its first reader waits for the line.
__device__ __forceinline__ void fetch_parameter(int64_t value) {
  asm volatile("" ::"l"(value));
}

__device__ __forceinline__ void fetch_parameter(float value) {
  asm volatile("" ::"f"(value));
}

__device__ __forceinline__ float2 load_from_l2(const float2* from) {
  float2 value;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(from)
               : "memory");
  return value;
}

// Adds to a counter, after all that the thread has written or has seen written, and before all that
// it reads next.
__device__ __forceinline__ int add_in_order(int* to, int value) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(value)
               : "memory");
  return before;
}

// A flag that says that all has been written that the thread wrote, or saw written, before.
__device__ __forceinline__ void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Tensor cores

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// The same of transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// Stores four such matrices, transposed; addresses are those of the transposed ones' rows.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
      : "memory");
}

// An 8x8 matrix of 16-bit elements that lies in a warp's registers, transposed.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t fragment) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

// Rows 0 to 7 of the sums are in `low`, 8 to 15 in `high`.
__device__ __forceinline__ void mma(float2& low, float2& high, const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(low.x), "+f"(low.y), "+f"(high.x), "+f"(high.y)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float2& low, float2& high, const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(low.x), "+f"(low.y), "+f"(high.x), "+f"(high.y)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// By all four warps of a warpgroup: registers that a thread gives back, or takes from then on.

template <int registers>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// A barrier among `threads` threads of the CTA, numbered apart from __syncthreads().
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts as so many threads of it without waiting: those of the warp.
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Clusters

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The cluster's number in the grid.
__device__ __forceinline__ uint32_t cluster_number() {
  uint32_t number;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return number;
}

// The address of the same shared memory in CTA `rank` of the cluster, which only some instructions
// take.
__device__ __forceinline__ uint32_t in_cta(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void store_in_cta(uint32_t there, float4 value) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Others need not see what this thread has written, which would cost a fence.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Programmatic dependent launch: let the next kernel of the stream start; wait until the kernels
// before are complete and their writes visible.

__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_dependencies() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The larger ones of two pairs of 16-bit floats; where either is NaN, NaN, always the same without
// a sign.

__device__ __forceinline__ uint32_t max_nan(uint32_t a, uint32_t b, __half) {
  uint32_t larger;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

__device__ __forceinline__ uint32_t max_nan(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

}  // namespace ptx
