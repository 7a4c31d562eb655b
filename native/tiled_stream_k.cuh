// Stream-K's partial tiles: accumulators that pass from one cluster to the next through L2, in the
// middle of a tile's atoms.
#pragma once

#include "tiled_gemm.cuh"

static_assert(Accumulators::kSets == 1, "accumulators are in one set");

// Each warp stores its accumulators for the same warp of the same CTA in the next cluster.
__device__ __forceinline__ void store_partial(const TiledGemmArgs& args, const Accumulators& acc) {
  const uint32_t thread = ptx::opaque<uint32_t>(threadIdx.x);
  float4* const to = args.partials + blockIdx.x * TILES * kConsumers + thread;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    const float2 a = acc.tile[0][2 * i], b = acc.tile[0][2 * i + 1];
    to[i * kConsumers] = {a.x, a.y, b.x, b.y};
  }
  __syncwarp();  // the release below covers the whole warp's stores
  if (thread % 32 == 0)
    ptx::store_release(args.partial_flags + blockIdx.x * kConsumerWarps + thread / 32, 1);
}

// Loads the partial tile of the cluster before, or zeros. Without a branch: with one ptxas would
// serialize the products.
__device__ __forceinline__ void load_partial(const TiledGemmArgs& args, int cluster_size,
                                             bool stored, Accumulators& acc) {
  const uint32_t thread = ptx::opaque<uint32_t>(threadIdx.x), cta = blockIdx.x - cluster_size;
  if (stored) {
    if (thread % 32 == 0) {
      int* const flag = args.partial_flags + cta * kConsumerWarps + thread / 32;
      while (ptx::load_acquire(flag) == 0)
        ;
      *flag = 0;
    }
    __syncwarp();
  }
  const float4* const from = args.partials + cta * TILES * kConsumers + thread;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    const float4 both = ptx::load_from_l2_or_zero(from + i * kConsumers, stored);
    acc.tile[0][2 * i] = {both.x, both.y};
    acc.tile[0][2 * i + 1] = {both.z, both.w};
  }
}
