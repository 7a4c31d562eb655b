// Element, the 16-bit float type of a kernel's operands: bfloat16 with -DBFLOAT16=1, else float16.
#pragma once

#include "ptx.cuh"

#if BFLOAT16
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif

// Two adjacent elements, for 4-byte accesses.
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

// Two elements in a register. Loading a word and unpacking it later does not wait for the load, as
// loading a Pair would.
__device__ __forceinline__ uint32_t packed(float first, float second) {
  Pair pair;
  convert(pair.first, first), convert(pair.second, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpacked(uint32_t both) {
  const Pair pair = *reinterpret_cast<const Pair*>(&both);
  return {to_float(pair.first), to_float(pair.second)};
}

// Load two adjacent elements without 4-byte alignment, or only the first.
__device__ __forceinline__ uint32_t load_unaligned(const Element* from, bool both) {
  const uint16_t* const words = reinterpret_cast<const uint16_t*>(from);
  return both ? words[0] | words[1] << 16 : words[0];
}

// Eight adjacent elements, for 16-byte accesses.
struct __align__(16) Chunk {
  Element of[8];
};
