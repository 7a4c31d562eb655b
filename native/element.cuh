// The 16-bit floats of a kernel's operands: -DBFLOAT16 is 0 or 1.
#pragma once

#include "ptx.cuh"

#if BFLOAT16
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif

// Two neighbours, read and written at once.
struct __align__(4) Pair {
  Element first, second;
};

__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ void convert(__half& to, float value) {
  to = __float2half_rn(value);
}
__device__ __forceinline__ void convert(__nv_bfloat16& to, float value) {
  to = __float2bfloat16_rn(value);
}

// Eight neighbours, likewise.
struct __align__(16) Chunk {
  Element of[8];
};
