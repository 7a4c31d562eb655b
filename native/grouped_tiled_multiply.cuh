// The main loop of tall tiles of the grouped tiled GEMM. A tile multiplies as many rows of X as it
// has, rounded up to one of a few sizes, each with code of its own.
#pragma once

#include "gemm_multiply.cuh"
#include "tiled_ring.cuh"

constexpr int kMaxProductTiles = 32;  // tiles of 8 rows of X that one wgmma multiplies

// `tiles` of a thread's accumulators, from tile `first` on.
template <int first, int tiles>
__device__ __forceinline__ float2 (&part_of(Accumulators& acc))[2 * tiles] {
  return reinterpret_cast<float2(&)[2 * tiles]>(acc.tile[0][2 * first]);
}

// Starts acc += W X^T for 64 columns of W and of `tiles` of X, both at shared addresses.
template <int tiles>
__device__ __forceinline__ void start_products(uint32_t w, uint32_t x, Accumulators& acc) {
  static_assert(tiles <= TILES, "accumulators suffice");
  constexpr int kFirst = tiles < kMaxProductTiles ? tiles : kMaxProductTiles;
  constexpr int kRest = tiles - kFirst;
  const uint64_t a = ptx::matrix_descriptor(w), b = ptx::matrix_descriptor(x);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kAtomK / 16; step++) {
    ptx::wgmma(part_of<0, kFirst>(acc), a + 2 * step, b + 2 * step, Element());
    if constexpr (kRest > 0) {
      const uint64_t rest = b + kMaxProductTiles * (kAtomBytes >> 4);
      ptx::wgmma(part_of<kFirst, kRest>(acc), a + 2 * step, rest + 2 * step, Element());
    }
  }
  ptx::wgmma_commit();
}

// Multiplies all stages of a tile, and releases them.
template <int tiles>
__device__ __forceinline__ void multiply_stages(int stages, const Ring& ring, uint32_t w_offset,
                                                RingPosition& stage, Accumulators& acc) {
  uint32_t empty_before = 0;  // the barrier of the stage before
#pragma unroll 1
  for (; stages > 0; stages--) {
    wait_barrier(ring.full_barrier[stage.stage], stage.parity);
    start_products<tiles>(ring.smem_w(stage.stage) + w_offset, ring.smem_x(stage.stage), acc);
    wait_but_for_last();
    if (empty_before) ring.release(empty_before);
    empty_before = ring.empty_barrier[stage.stage];
    stage.advance(ring.stages);
  }
  wait_for(acc);
  ring.release(empty_before);
}

// The same for the first of these sizes, in tiles of 8 rows, that holds `rows` rows of X.
template <int tiles, int... larger>
__device__ __forceinline__ void multiply_rows_of(int rows, int stages, const Ring& ring,
                                                 uint32_t w_offset, RingPosition& stage,
                                                 Accumulators& acc) {
  if constexpr (sizeof...(larger) > 0) {
    if (rows > tiles * kRowsPerBlock)
      return multiply_rows_of<larger...>(rows, stages, ring, w_offset, stage, acc);
  }
  multiply_stages<tiles>(stages, ring, w_offset, stage, acc);
}

__device__ __forceinline__ void multiply_tile(const Tiles& tile, const Ring& ring,
                                              uint32_t w_offset, RingPosition& stage,
                                              Accumulators& acc) {
  const int rows = __shfl_sync(0xffffffff, tile.rows_end - tile.n, 0);  // uniform, for the compiler
  multiply_rows_of<TILED_TALL_SIZES>(rows, tile.k_end, ring, w_offset, stage, acc);
}
