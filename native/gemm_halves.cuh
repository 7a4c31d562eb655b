// How SplitK_GEMM's CTAs multiply half of K each, for one sum of both: the warps that have the same
// octets leave their sums in a workspace, and the one that comes second adds the other's to its
// own, which gives the same bits whoever that is.
#pragma once

#include "splitk_gemm.cuh"

// Leaves the sums of a warp's two octets, from `octet` on, of which `octets` exist. True where the
// other half's have been added to them, and they are whole.
__device__ __forceinline__ bool add_halves(const SplitKGemmArgs& args, int half, int octet,
                                           int octets, Sums& sums) {
  constexpr int kOctetSums = X_TILES * 32;  // those of its 8 rows, a lane's two
  const int lane = threadIdx.x % 32, all = (args.m + kOctetRows - 1) / kOctetRows;
  if (octets <= 0) return false;
  float2* const own = args.halves + (half * all + octet) * kOctetSums + lane;
  const float2* const other = args.halves + ((1 - half) * all + octet) * kOctetSums + lane;
#pragma unroll
  for (int i = 0; i < 2 * X_TILES; i++) {
    const int j = i % 2;
    if (j < octets) own[j * kOctetSums + i / 2 * 32] = sums.tile[0][i];
  }
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    before = ptx::add_in_order(args.arrivals + octet, 1);
    if (before) args.arrivals[octet] = 0;
  }
  before = __shfl_sync(0xffffffff, before, 0);
  __syncwarp();
  if (before == 0) return false;
#pragma unroll
  for (int i = 0; i < 2 * X_TILES; i++) {
    const int j = i % 2;
    if (j >= octets) continue;
    const float2 more = ptx::load_from_l2(other + j * kOctetSums + i / 2 * 32);
    sums.tile[0][i].x += more.x, sums.tile[0][i].y += more.y;
  }
  return true;
}
