// The ring of shared-memory stages of a CTA of SplitK_GEMM, and its barriers.
#pragma once

#include "splitk_gemm.cuh"

// For many rows of X stages are short, so the time to issue one counts: a whole warp then runs the
// producer's loop, whose values are in uniform registers, from which copies start at once. For few
// rows a single thread has its first copies in flight sooner.
constexpr bool kWholeWarps = TILES >= 4;

// True in the one thread of a producer that starts copies and arrives at barriers.
__device__ __forceinline__ bool is_copying_thread() {
  return !kWholeWarps || ptx::elect_one();
}

// A stage is W, [groups][atoms][row blocks][8 rows][128 bytes], then X, [atoms][rows][128 bytes].
// With units W is [units][row blocks][unit] and padding: X is aligned to 1 KiB. The consumers'
// partial sums lie before the first stage.
// With a congestion window X has a barrier of its own, so that the W producer sees W land.
struct Ring {
  Barriers full_barrier;    // [stages]: W has landed; if there is no window, X too
  Barriers x_full_barrier;  // [stages]: X has landed; used only if there is a window
  Barriers empty_barrier;   // [stages]: all warps that read the stage have released it
  uint32_t smem_first;
  int stages, group_bytes, w_bytes, stage_bytes;
  bool windowed;
  bool divided;  // a group has row blocks for both warpgroups
  bool shared;   // both warpgroups read every stage

  __device__ __forceinline__ Ring(const SplitKGemmArgs& args, const Tier& tier, uint64_t* barriers)
      : full_barrier{in_register(ptx::smem_address(barriers))},
        x_full_barrier{full_barrier[kMaxStages]},
        empty_barrier{full_barrier[2 * kMaxStages]},
        smem_first(in_register(ptx::smem_address(smem)) + kSumsBytes),
        stages(tier.stages),
        group_bytes(tier.group_row_blocks * tier.stage_atoms * kWAtomBytes),
        w_bytes(kHasUnits ? (group_bytes + 1023) / 1024 * 1024
                          : (kPairs ? tier.groups : 1) * group_bytes),
        stage_bytes(w_bytes + tier.stage_atoms * kXAtomBytes),
        windowed(tier.window < tier.stages),
        divided(tier.group_row_blocks > kTileRowBlocks),
        shared(kHasUnits || divided || kPairs && tier.groups == 2 || has_halves(args)) {}

  // By the W producer. Initialises all kMaxStages: a loop over `stages` is slower.
  __device__ __forceinline__ void initialize_full() const {
#pragma unroll
    for (int i = 0; i < kMaxStages; i++)
      ptx::mbarrier_init(full_barrier[i], windowed ? 1 : 2);
    ptx::fence_mbarrier_init();
  }
  // By the X producer, at the same time.
  __device__ __forceinline__ void initialize_empty() const {
    const int readers = (shared ? kConsumers : kWarpgroup) / 32 * kArrivalsOfWarp;
#pragma unroll
    for (int i = 0; i < kMaxStages; i++) {
      ptx::mbarrier_init(empty_barrier[i], readers);
      ptx::mbarrier_init(x_full_barrier[i], 1);
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t smem_w(int stage) const {
    return smem_first + stage * stage_bytes;
  }
  __device__ __forceinline__ uint32_t smem_x(int stage) const { return smem_w(stage) + w_bytes; }
};
