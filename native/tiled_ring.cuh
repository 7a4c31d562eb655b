// The ring of shared-memory stages of a CTA of the tiled GEMM, and the barriers of a cluster.
#pragma once

#include "tiled_staging.cuh"

// Shared memory: blocks of outputs, units of W if it has any (tiled_units.cuh), then stages, each W
// [row blocks][8 rows][128 bytes], without units, and X [rows][128 bytes], 64 columns of both. CTAs that share W or
// X fill each other's stages by multicast, so a stage is empty when the consumers of all of them
// have released it.
struct Ring {
  Barriers full_barrier;   // [stages]: W and X have landed
  Barriers empty_barrier;  // [stages]: all consumer warps of all sharers have released it
  uint32_t smem_first;
  int stages, w_bytes, stage_bytes;
  int sharers, first_sharer;

  __device__ __forceinline__ Ring(const TiledGemmArgs& args, const TierTiles& tier,
                                  const CtaCoord& cta, uint64_t* barriers)
      : full_barrier{in_register(ptx::smem_address(barriers))},
        empty_barrier{full_barrier[kMaxStages]},
        smem_first(in_register(ptx::smem_address(smem)) +
                   kConsumerWarps * args.output_blocks * kBlockBytes + ring_of_units(tier)),
        stages(tier.stages),
        w_bytes(kHasUnits ? 0 : tier.tile_row_blocks * kAtomBytes),
        stage_bytes(w_bytes + x_rows_of(args, tier) * (kAtomK * 2)),
        sharers(cta.sharers),
        first_sharer(cta.first_sharer) {}

  // By a thread of every warp: one thread alone would take a while.
  __device__ __forceinline__ void initialize(int warp) const {
#pragma unroll 1
    for (int i = warp; i < stages; i += kTiledThreads / 32) {
      ptx::mbarrier_init(full_barrier[i], kHasUnits ? 1 : 2);
      ptx::mbarrier_init(empty_barrier[i],
                         kConsumerWarps * (sharers > 1 ? sharers : kArrivalsOfWarp));
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t smem_w(int stage) const {
    return smem_first + stage * stage_bytes;
  }
  __device__ __forceinline__ uint32_t smem_x(int stage) const { return smem_w(stage) + w_bytes; }

  // By a consumer warp: tells all sharers that it has read a stage, given by its empty barrier.
  __device__ __forceinline__ void release(uint32_t empty) const {
    __syncwarp();
    if (sharers == 1) {
      if (arrives_for_warp()) ptx::mbarrier_arrive(empty);
    } else if (threadIdx.x % 32 < sharers) {
      ptx::mbarrier_arrive_cluster(empty, first_sharer + threadIdx.x % 32);
    }
  }
};

// Barriers of CTAs of a cluster with a segment of K each (tiled_segments.cuh).
struct SegmentBarriers {
  static constexpr int kCount = kConsumerWarps + 2;

  const Barriers landed;  // [warps]: the other CTAs' partial sums for this warp have landed

  __device__ __forceinline__ explicit SegmentBarriers(uint32_t first) : landed{first} {}

  // All consumer warps of all these CTAs have read the tile's last stage.
  __device__ __forceinline__ uint32_t drained() const { return landed[kConsumerWarps]; }
  // The warps of CTAs that share stages have reduced their partial sums: stages may be refilled.
  __device__ __forceinline__ uint32_t reduced() const { return landed[kConsumerWarps + 1]; }

  // By one thread.
  __device__ __forceinline__ void initialize(int k_ctas, int sharers) const {
    for (int i = 0; i < kConsumerWarps; i++)
      ptx::mbarrier_init(landed[i], 1);
    ptx::mbarrier_init(drained(), kConsumerWarps * k_ctas);
    ptx::mbarrier_init(reduced(), kConsumerWarps * (sharers > 1 ? sharers : kArrivalsOfWarp));
    ptx::fence_mbarrier_init();
  }
};
