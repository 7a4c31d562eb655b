// Loads of global memory in a way or an order of their own, counters and flags.
#pragma once

#include "ptx_words.cuh"

namespace ptx {

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

// Reads a parameter of the kernel, which is never -1, here and not later: its first reader waits
// for the line. What nothing depends on is not read, but a store does that never happens; an end of
// the kernel would cost registers.
__device__ __forceinline__ void fetch_parameter(int value) {
  asm volatile(
      "{\n.reg .pred never;\nsetp.eq.s32 never, %0, -1;\n"
      "@never st.shared::cta.b32 [%0], %0;\n}" ::"r"(value)
      : "memory");
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

}  // namespace ptx
