// How SplitK_GEMM's CTAs multiply half of K each, for one sum of both: the warps that have the same
// row blocks leave their sums in a workspace, and the one that comes second adds the other's to its
// own, which gives the same bits whoever that is.
#pragma once

#include "splitk_gemm.cuh"

// Leaves the sums of a warp's two row blocks, from `row_block` on, of which `row_blocks` exist.
// True where the other half's have been added to them, and they are whole.
__device__ __forceinline__ bool add_halves(const SplitKGemmArgs& args, int half, int row_block,
                                           int row_blocks, Sums& sums) {
  constexpr int kRowBlockSums = X_TILES * 32;  // those of its 8 rows, a lane's two
  const int lane = threadIdx.x % 32, all = (args.m + kRowsPerBlock - 1) / kRowsPerBlock;
  if (row_blocks <= 0) return false;
  float2* const own = args.halves + (half * all + row_block) * kRowBlockSums + lane;
  const float2* const other = args.halves + ((1 - half) * all + row_block) * kRowBlockSums + lane;
#pragma unroll
  for (int i = 0; i < 2 * X_TILES; i++) {
    const int j = i % 2;
    if (j < row_blocks) own[j * kRowBlockSums + i / 2 * 32] = sums.tile[0][i];
  }
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    before = ptx::add_in_order(args.arrivals + row_block, 1);
    if (before) args.arrivals[row_block] = 0;
  }
  before = __shfl_sync(0xffffffff, before, 0);
  __syncwarp();
  if (before == 0) return false;
#pragma unroll
  for (int i = 0; i < 2 * X_TILES; i++) {
    const int j = i % 2;
    if (j >= row_blocks) continue;
    const float2 more = ptx::load_from_l2(other + j * kRowBlockSums + i / 2 * 32);
    sums.tile[0][i].x += more.x, sums.tile[0][i].y += more.y;
  }
  return true;
}
