// Multiplies the atoms of one stage: a warpgroup with wgmma on sm_90a, each warp with mma
// elsewhere. Both add the terms of K in the same order into the same registers.
//
// A warpgroup multiplies 64 rows, 16 a warp. Rows behind the last row block are multiplied as well,
// whatever shared memory holds there, and never stored.
#pragma once

#include "gemm_common.cuh"

#if WGMMA
#include "wgmma.cuh"

// Starts acc += W X^T for `atoms` of W, `w_atom` apart, and of X, both given by descriptors.
template <int atoms, class Sums>
__device__ __forceinline__ void multiply(uint64_t w, uint32_t w_atom, uint64_t x, Sums& acc) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < atoms; i++) {
#pragma unroll
    for (int step = 0; step < kAtomK / 16; step++) {
      ptx::wgmma(acc.tile[step % Accumulators::kSets], w + i * w_atom + 2 * step,
                 x + i * (kXAtomBytes >> 4) + 2 * step, Element());
    }
  }
  ptx::wgmma_commit();
}

// The same for `atoms` of W from shared address `w` on, `w_atom` bytes apart, and of X from `x` on.
// Two atoms make one group of wgmmas: fence and commit of a group cost as much as its products.
template <class Sums>
__device__ __forceinline__ void multiply(uint32_t w, uint32_t w_atom, uint32_t x, int atoms,
                                         Sums& acc, int /* row_blocks */ = kTileRowBlocks) {
  uint64_t a = ptx::matrix_descriptor(w), b = ptx::matrix_descriptor(x);
  w_atom >>= 4;
#pragma unroll 1
  for (; atoms >= 2; atoms -= 2, a += 2 * w_atom, b += 2 * (kXAtomBytes >> 4))
    multiply<2>(a, w_atom, b, acc);
  if (atoms == 1) multiply<1>(a, w_atom, b, acc);
}

// Waits until only the group of wgmmas that was started last still reads shared memory.
__device__ __forceinline__ void wait_but_for_last() {
  ptx::wgmma_wait_but_one();
}

__device__ __forceinline__ void wait_for(Accumulators& acc) {
  ptx::wgmma_wait(acc.tile);
}

#else

// acc += W X^T for `atoms` of W from shared address `w` on, `w_atom` bytes apart, and of X. Behind
// the warpgroup's `row_blocks` copies may land meanwhile: the race checker would report such reads.
template <typename X = SwizzledX>
__device__ __forceinline__ void multiply(uint32_t w, uint32_t w_atom, uint32_t x_address, int atoms,
                                         Accumulators& acc, int row_blocks = kTileRowBlocks) {
  // ldmatrix addresses. Of W, lanes 8-15 and 24-31 read the warp's second row block, lanes 16-31
  // the next 8 k. In a swizzled row of 128 bytes an XOR of the address reaches the other chunks.
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32, row = lane % 8;
  int row_block = 2 * warp + lane / 8 % 2;
#if RACECHECK
  row_block = min(row_block, row_blocks - 1);
#endif
  w += row_block * kAtomBytes + row * 128 + ((lane / 16 ^ row) << 4);
  X x(x_address, lane);
#pragma unroll 1
  for (int i = 0; i < atoms; i++, w += w_atom, x.next_atom()) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t a[2][4];
#pragma unroll
      for (int step = 0; step < 2; step++)
        ptx::ldmatrix_x4(a[step], w ^ (64 * half + 32 * step));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, x.chunk(tile, half));
#pragma unroll
        for (int step = 0; step < 2; step++) {
          float2(&set)[2 * TILES] = acc.tile[(2 * half + step) % Accumulators::kSets];
          ptx::mma(set[2 * tile], set[2 * tile + 1], a[step], b[2 * step], b[2 * step + 1],
                   Element());
        }
      }
    }
  }
}

#endif
