// Halves of K in SplitK_GEMM: two CTAs sum one half each, or one CTA sums both in turn. Here the
// halves are combined: each warp stores its partial sums in a workspace, and the warp that arrives
// second adds those of the other half to its own. a + b = b + a bit for bit, so any may be second.
#pragma once

#include "splitk_gemm.cuh"

// Partial sums of a row block, in float2s: one for each lane and tile of X.
constexpr int kRowBlockPartials = TILES * 32;

// Stores a warp's partial sums of two row blocks, of which `row_blocks` exist.
__device__ __forceinline__ void store_partial(float2* to, int row_blocks, const Accumulators& acc) {
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int j = i % 2;
    if (j < row_blocks) to[j * kRowBlockPartials + i / 2 * 32] = acc.tile[0][i];
  }
}

// Stores the partial sums of half `half` for the warp's row blocks, from `row_block` of the matrix
// on. True in the warp that arrives second: its accumulators are then whole.
__device__ __forceinline__ bool combine(const SplitKGemmArgs& args, int half, int row_block,
                                        int row_blocks, Accumulators& acc) {
  const int lane = threadIdx.x % 32, all = (args.m + kRowsPerBlock - 1) / kRowsPerBlock;
  if (row_blocks <= 0) return false;
  float2* const own = args.partials + (half * all + row_block) * kRowBlockPartials + lane;
  const float2* const other =
      args.partials + ((1 - half) * all + row_block) * kRowBlockPartials + lane;
  store_partial(own, row_blocks, acc);
  // Count arrivals: the warp's stores are ordered before lane 0's. The second resets the count.
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    before = ptx::atomic_add_acq_rel(args.arrivals + row_block, 1);
    if (before) args.arrivals[row_block] = 0;
  }
  before = __shfl_sync(0xffffffff, before, 0);
  __syncwarp();
  if (before == 0) return false;
  // From L2: this SM's L1 knows nothing of the other CTA's stores.
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int j = i % 2;
    if (j >= row_blocks) continue;
    const float2 more = ptx::load_from_l2(other + j * kRowBlockPartials + i / 2 * 32);
    acc.tile[0][i].x += more.x, acc.tile[0][i].y += more.y;
  }
  return true;
}
