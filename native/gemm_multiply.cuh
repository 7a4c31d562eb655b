// How a warpgroup multiplies the atoms of a stage: with wgmma where there is one, else every warp
// its two row blocks with mma. Either way the sums of k go in order, and lie in the same registers.
//
// Rows go by 64, 16 a warp. What lies behind the last row block is read as well, and what that
// gives never stored.
#pragma once

#include "gemm_common.cuh"

#ifndef WGMMA
#define WGMMA (__CUDA_ARCH__ == 900)
#endif

#if WGMMA
#include "wgmma.cuh"

// `atoms` of W, `w_atom` apart, and of X, given by their descriptors.
template <int atoms>
__device__ __forceinline__ void multiply(uint64_t w, uint32_t w_atom, uint64_t x, Sums& sums) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < atoms; i++) {
#pragma unroll
    for (int step = 0; step < kAtomK / 16; step++) {
      ptx::wgmma(sums.tile[step % Sums::kSets], w + i * w_atom + 2 * step,
                 x + i * (kXAtomBytes >> 4) + 2 * step, Element());
    }
  }
  ptx::wgmma_commit();
}

// Starts on `atoms` of W, `w_atom` bytes apart from `w` on, and of X from `x` on. By twos: what has
// to be done before and after products costs as much as they do.
__device__ __forceinline__ void multiply(uint32_t w, uint32_t w_atom, uint32_t x, int atoms,
                                         Sums& sums) {
  uint64_t a = ptx::matrix_descriptor(w), b = ptx::matrix_descriptor(x);
  w_atom >>= 4;
#pragma unroll 1
  for (; atoms >= 2; atoms -= 2, a += 2 * w_atom, b += 2 * (kXAtomBytes >> 4))
    multiply<2>(a, w_atom, b, sums);
  if (atoms == 1) multiply<1>(a, w_atom, b, sums);
}

// Until nothing is read any more but by what was started last.
__device__ __forceinline__ void wait_but_for_last() {
  ptx::wgmma_wait_but_one();
}

__device__ __forceinline__ void wait_for(Sums& sums) {
  ptx::wgmma_wait(sums.tile);
}

#else

__device__ __forceinline__ void multiply(uint32_t w, uint32_t w_atom, uint32_t x, int atoms,
                                         Sums& sums) {
  // Lanes of ldmatrix: of W the second eight read the second row block, and the second sixteen the
  // next 8 k; of X every eight read 8 k more. In swizzled rows of 128 bytes the others of a lane's
  // 16 bytes are reached by an exclusive or.
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32, row = lane % 8;
  w += (2 * warp + lane / 8 % 2) * kAtomBytes + row * 128 + ((lane / 16 ^ row) << 4);
  x += row * 128 + ((lane / 8 ^ row) << 4);
#pragma unroll 1
  for (int i = 0; i < atoms; i++, w += w_atom, x += kXAtomBytes) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t a[2][4];
#pragma unroll
      for (int step = 0; step < 2; step++)
        ptx::ldmatrix_x4(a[step], w ^ (64 * half + 32 * step));
#pragma unroll
      for (int tile = 0; tile < X_TILES; tile++) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, (x ^ 64 * half) + tile * 8 * 128);
#pragma unroll
        for (int step = 0; step < 2; step++) {
          float2(&set)[2 * X_TILES] = sums.tile[(2 * half + step) % Sums::kSets];
          ptx::mma(set[2 * tile], set[2 * tile + 1], a[step], b[2 * step], b[2 * step + 1],
                   Element());
        }
      }
    }
  }
}

#endif
