// Global memory: loads with a cache or ordering choice, counters and flags.
#pragma once

#include "ptx_words.cuh"

namespace ptx {

// Load an address of weights from a table, which no kernel beside this one writes.
__device__ __forceinline__ const uint8_t* load_address(const uint64_t* from) {
  uint64_t value;
  asm("ld.global.nc.b64 %0, [%1];" : "=l"(value) : "l"(from));
  return reinterpret_cast<const uint8_t*>(value);
}

// Prefetch a line to L1.
__device__ __forceinline__ void prefetch(const void* line) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(line) : "memory");
}

// Load past L1, for data that another SM wrote. Ordering comes from fences or atomic_add_acq_rel().
__device__ __forceinline__ float4 load_from_l2(const float4* from) {
  float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

// Load past L1, or zeros where not `loads`, without a branch.
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

__device__ __forceinline__ float2 load_from_l2_or_zero(const float2* from, bool loads) {
  float2 value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nmov.f32 %0, 0f00000000;\n"
      "mov.f32 %1, 0f00000000;\n"
      "@p ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n}"
      : "=f"(value.x), "=f"(value.y)
      : "l"(from), "r"(static_cast<int>(loads))
      : "memory");
  return value;
}

// Load a line into L1 ahead of its use. An unused load would be dropped, so the kernel traps on a
// bit pattern that no table or weight contains: a NaN with a payload, in 32 bits and in 16.
__device__ __forceinline__ void touch(const void* line) {
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

// Read a kernel parameter ahead of its use, so that later readers do not wait for its cache line.
// An unused read would be dropped, so a store that never happens depends on it: the parameter must
// never be -1. A trap in place of the store would cost registers.
__device__ __forceinline__ void fetch_parameter(int value) {
  asm volatile(
      "{\n.reg .pred never;\nsetp.eq.s32 never, %0, -1;\n"
      "@never st.shared::cta.b32 [%0], %0;\n}" ::"r"(value)
      : "memory");
}

__device__ __forceinline__ float load_from_l2(const float* from) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ int load_from_l2(const int* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ float2 load_from_l2(const float2* from) {
  float2 value;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(from)
               : "memory");
  return value;
}

// Store a word, or two at once, that another SM loads past L1 again and again until it is there.
__device__ __forceinline__ void store_to_l2(float* to, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void store_to_l2(float2* to, float2 value) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(value.x), "f"(value.y)
               : "memory");
}

// Where such a loop begins anew: the emulator lets others run.
__device__ __forceinline__ void spin() {}

// Add to a counter with acquire and release at gpu scope: after all that the thread has written or
// observed, before all that it reads next. Returns the previous value.
__device__ __forceinline__ int atomic_add_acq_rel(int* to, int value) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(value)
               : "memory");
  return before;
}

// Order what the thread has written or observed before what it reads or writes next, at gpu scope.
__device__ __forceinline__ void fence_acq_rel() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Store a flag with release at gpu scope: whoever acquires it sees all that this thread wrote or
// observed before.
__device__ __forceinline__ void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// The same at system scope: for a flag that the CPU writes, in host memory.
__device__ __forceinline__ int load_acquire_sys(const int* from) {
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Store a flag in host memory for the CPU: where it sees the flag, it sees all stores before it.
__device__ __forceinline__ void store_release_sys(int* to, int value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

}  // namespace ptx
