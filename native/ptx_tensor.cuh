// Tensor cores, and arithmetic on pairs of 16-bit floats.
#pragma once

#include "ptx_words.cuh"

namespace ptx {

// Tensor cores

// Load four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// Load four such matrices transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// Store four such matrices.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
      : "memory");
}

// Store four such matrices transposed; addresses are of rows of the transposed matrices.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
      : "memory");
}

// Transpose an 8x8 matrix of 16-bit elements in a warp's registers.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t fragment) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

// c += a b for a 16x16, b 16x8. `top` has rows 0 to 7 of c, `bottom` rows 8 to 15.
__device__ __forceinline__ void mma(float2& top, float2& bottom, const uint32_t (&a)[4],
                                    uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(top.x), "+f"(top.y), "+f"(bottom.x), "+f"(bottom.y)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float2& top, float2& bottom, const uint32_t (&a)[4],
                                    uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(top.x), "+f"(top.y), "+f"(bottom.x), "+f"(bottom.y)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sum, difference and product of two pairs of 16-bit floats, rounded to the nearest. Not fused.
#define DEFINE_ARITHMETIC(name, type, Element)                                          \
  __device__ __forceinline__ uint32_t name(uint32_t a, uint32_t b, Element) {           \
    uint32_t result;                                                                    \
    asm(#name ".rn." type " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));              \
    return result;                                                                      \
  }
DEFINE_ARITHMETIC(add, "f16x2", __half)
DEFINE_ARITHMETIC(sub, "f16x2", __half)
DEFINE_ARITHMETIC(mul, "f16x2", __half)
DEFINE_ARITHMETIC(add, "bf16x2", __nv_bfloat16)
DEFINE_ARITHMETIC(sub, "bf16x2", __nv_bfloat16)
DEFINE_ARITHMETIC(mul, "bf16x2", __nv_bfloat16)
#undef DEFINE_ARITHMETIC

// a b + c for pairs, rounded once.
__device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c, __half) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Two adjacent e4m3 numbers as a pair of halves, exactly.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint16_t both) {
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(both));
  return result;
}

// Element-wise maximum of two pairs of 16-bit floats. NaN if either is NaN, always the same NaN
// without a sign.

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

// Maximum; NaN if either is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace ptx
