// Reductions over a warp and over a CTA.
#pragma once

#include "ptx.cuh"

constexpr int kMaxWarps = 32;

template <class T, class Combine>
__device__ __forceinline__ T reduce_warp(T value, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffff, value, distance));
  return value;
}

// Reduce `value` over the CTA; every thread gets the same bits. `combine` is commutative with T()
// as its identity. `parts` is shared memory used for nothing else.
template <class T, class Combine>
__device__ __forceinline__ T reduce_cta(T value, T (&parts)[kMaxWarps], Combine combine) {
  const int lane = threadIdx.x % 32;
  value = reduce_warp(value, combine);
  if (lane == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce_warp(lane < blockDim.x / 32 ? parts[lane] : T(), combine);
}
