// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for many rows of X, the rows of W lying in several tiers.
//
// W is packed as SplitK_GEMM reads it (dakrun/kernels/packing.py). A CTA serves one tier and
// computes tiles, one after the other: two warpgroups multiply 64 rows of W and kXRows of X each,
// beside each other along W or along X. A warp keeps copies of W in flight into a ring of stages,
// another those of X. Sums go along all of K in one order, so that no bit of Y depends on tiers,
// tiles or the number of CTAs.

#include "gemm_multiply.cuh"
#include "tiled_epilogue.cuh"

static_assert(WGMMA || X_TILES <= 16, "with more, operands of mma would spill");

// Shared memory: outputs on their way, then stages, each W [octets][8 rows][128 bytes] and X
// [rows][128 bytes], 64 columns of both.
struct Ring {
  Barriers full_barrier;   // [stages]: W and X have landed
  Barriers empty_barrier;  // [stages]: all warps that multiply are done with it
  uint32_t first;
  int stages, w_bytes, stage_bytes;

  __device__ __forceinline__ Ring(const TierTiles& tier, uint64_t* barriers)
      : full_barrier{in_register(ptx::smem_address(barriers))},
        empty_barrier{full_barrier[kMaxStages]},
        first(in_register(ptx::smem_address(smem)) + kWarpgroups * kStagingBytes),
        stages(tier.stages),
        w_bytes(tier.row_groups * kTileOctets * kAtomBytes),
        stage_bytes(w_bytes + kWarpgroups / tier.row_groups * kXAtomBytes) {}

  __device__ __forceinline__ void initialize() const {
#pragma unroll
    for (int i = 0; i < kMaxStages; i++) {
      ptx::mbarrier_init(full_barrier[i], 2);
      ptx::mbarrier_init(empty_barrier[i], kConsumers / 32 * kArrivalsOfWarp);
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t w(int stage) const { return first + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t x(int stage) const { return w(stage) + w_bytes; }
};

// By a whole warp: lane i copies octet i of a tile, and those that lie behind it in its group.
__device__ __forceinline__ void load_w(const TiledGemmArgs& args, const Ring& ring, int number) {
  const int lane = threadIdx.x % 32, window = args.tiers[number].window;
  RingPosition fill, landed;
  int issued = 0;
  for (Tiles tile(args, number); !tile.done(); tile.next()) {
    const Octet from(args.weight, tile.octet + min(lane, tile.octets - 1));
    const bool copies = lane < tile.octets && (lane == 0 || from.place == 0);
    const int octets = min(tile.octets - lane, from.group_octets - from.place);
#pragma unroll 1
    for (int atom = 0; atom < args.weight.atoms; atom++, issued++) {
      if (window < ring.stages && issued >= window) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(ring.stages);
      }
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      const uint32_t barrier = ring.full_barrier[fill.stage];
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, tile.octets * kAtomBytes);
      __syncwarp();
      if (copies) {
        ptx::bulk_load(ring.w(fill.stage) + lane * kAtomBytes, from.atom(atom), octets * kAtomBytes,
                       barrier);
      }
      fill.advance(ring.stages);
    }
  }
}

// By one thread. What a box has beyond X is zero.
__device__ __forceinline__ void load_x(const TiledGemmArgs& args, const Ring& ring, int number) {
  const int boxes = kWarpgroups / args.tiers[number].row_groups;
  RingPosition fill;
  for (Tiles tile(args, number); !tile.done(); tile.next()) {
#pragma unroll 1
    for (int atom = 0; atom < args.weight.atoms; atom++) {
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      const uint32_t barrier = ring.full_barrier[fill.stage];
      ptx::mbarrier_arrive_expect_tx(barrier, boxes * kXAtomBytes);
      for (int i = 0; i < boxes; i++) {
        ptx::tensor_load(ring.x(fill.stage) + i * kXAtomBytes, &args.x, atom * kAtomK,
                         tile.n + i * kXRows, 0, barrier);
      }
      fill.advance(ring.stages);
    }
  }
}

// By a warpgroup that has nothing to multiply.
__device__ __forceinline__ void pass_stages(int count, const Ring& ring, RingPosition& stage) {
  for (; count > 0; count--) {
    wait_barrier(ring.full_barrier[stage.stage], stage.parity);
    __syncwarp();
    if (arrives_for_warp()) ptx::mbarrier_arrive(ring.empty_barrier[stage.stage]);
    stage.advance(ring.stages);
  }
}

__device__ __forceinline__ void consume(const TiledGemmArgs& args, const Ring& ring, int number,
                                        int warpgroup) {
  const bool along_w = args.tiers[number].row_groups == kWarpgroups;
  const int first_octet = along_w ? warpgroup * kTileOctets : 0;
  const int first_row = along_w ? 0 : warpgroup * kXRows;
  const uint32_t of_w = first_octet * kAtomBytes, of_x = first_row * kAtomK * 2;
  const bool arrives = arrives_for_warp();
  const Staging staging(ring.first - kWarpgroups * kStagingBytes, warpgroup);
  RingPosition stage;
  for (Tiles tile(args, number); !tile.done(); tile.next()) {
    if (first_octet >= tile.octets || tile.n + first_row >= args.n) {
      pass_stages(args.weight.atoms, ring, stage);
      continue;
    }
    const TileOutputs outputs(args, staging, tile.octet + first_octet, tile.octets - first_octet,
                              tile.n + first_row);
    Sums sums;
#if WGMMA  // products go on behind multiply(): a stage is free when those of the next one do
    uint32_t before = 0;  // the barrier of the stage before, to be freed
#endif
#pragma unroll 1
    for (int left = args.weight.atoms; left > 0; left--) {
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      multiply(ring.w(stage.stage) + of_w, 0, ring.x(stage.stage) + of_x, 1, sums);
#if WGMMA
      wait_but_for_last();
      __syncwarp();
      if (before && arrives) ptx::mbarrier_arrive(before);
      before = ring.empty_barrier[stage.stage];
#else
      __syncwarp();
      if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[stage.stage]);
#endif
      stage.advance(ring.stages);
    }
#if WGMMA
    wait_for(sums);
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(before);
#endif
    outputs.put(sums);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tiled_gemm(const __grid_constant__ TiledGemmArgs args) {
  __shared__ uint64_t barriers[2 * kMaxStages];
  ptx::launch_dependents();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the compiler sees it is uniform
  const int number = tier_of_cta(args);
  const Ring ring(args.tiers[number], barriers);
  if (threadIdx.x == kConsumers) {
    ptx::prefetch_tensor_map(&args.x);
    ring.initialize();
  }
  __syncthreads();
  // Every thread waits for the kernels before, also those that read nothing of theirs: that this
  // kernel is complete then implies that those before it are, at any distance.
  if (warp == kConsumers / 32) {
    load_w(args, ring, number);
    ptx::wait_for_dependencies();
    return;
  }
  ptx::wait_for_dependencies();
  if (warp < kConsumers / 32) {
    consume(args, ring, number, warp / (kWarpgroup / 32));
  } else if (ptx::elect_one()) {
    load_x(args, ring, number);
  }
}
