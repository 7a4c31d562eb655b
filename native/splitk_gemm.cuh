// The arguments of SplitK_GEMM, and which tier a CTA serves.
#pragma once

#include "gemm_common.cuh"

constexpr int kThreads = SPLITK_THREADS;
constexpr int kMaxStages = SPLITK_MAX_STAGES;
static_assert(kThreads == kConsumers + 2 * 32, "consumers, a producer warp for W and one for X");

// A variant has -DNORM=1 if X is normalised, -DMIXES=1 if the first tier's CTAs also take groups of
// another tier.
constexpr bool kPairs = TILES == 8;  // stages may have two groups: X is then the larger operand
constexpr bool kHalves = kPairs && !NORM;
constexpr bool kMixes = MIXES;
static_assert(!kMixes || !kPairs, "a stage's two groups are of one tier");
static_assert(!kHasUnits || TILES <= 2 && !NORM, "units: at most 16 rows of X, and no NORM");

enum Norm : int { kRmsNorm = 1, kLayerNorm = 2 };

// How a tier's row blocks are stored and which CTAs compute them. A group is the row blocks that a
// CTA multiplies together, a wave one group for each of the tier's CTAs, a step the columns of a
// group that are contiguous in memory. CTA c takes the groups c, c + CTAs, ...
// A wave is stored as [steps][groups][atoms of the step][row blocks], so that CTAs side by side
// read memory side by side. One remote tier may have no CTAs: the first tier's take its groups.
struct Tier {
  int first_row_block;  // of the matrix; the tier ends where the next one begins
  int first_cta;        // likewise
  int wave_row_blocks;
  int group_row_blocks;  // at most kWarpgroups * kTileRowBlocks; fewer in the tier's last group
  int step_atoms;        // a multiple of stage_atoms
  int stage_atoms;       // a multiple of x_atoms
  int stages;            // at least 2, so that one can be freed while another is read
  int window;            // congestion window: stages of W that a CTA may have in flight
  int x_boxes;           // TMA boxes of X a stage
  int group_stages;      // stages of a whole group
  int groups;            // groups a stage: 1, or 2 of up to kTileRowBlocks with kPairs
  int all_groups;        // with kMixes: groups that this tier's CTAs take
  int mixed_groups;      // with kMixes: how many of these are the mixed tier's
};

// Fields that a CTA needs first lie together: each launch fetches every line of them anew.
struct SplitKGemmArgs {
  TensorMap x;  // [K / 64][N][64], box of x_atoms x kXRows x 64, 128-byte swizzle
  int tier_count;
  int m, n, k;  // k is padded to a multiple of 64
  int x_atoms;  // atoms of a box of X; if 1, the map is [1][N][K] and K may be ragged
  int activation;
  CtaOrder order;
  int mixed_tier;             // with kMixes: the tier without CTAs
  const uint64_t* addresses;  // [tier_count], in global memory: where each tier's row blocks lie
  const Element* bias;        // [M], or null
  Tier tiers[kMaxTiers + 1];  // one more for the last tier's end
  const Element* residual;    // [N, M], or null; not with kSiluMul
  Element* y;                 // [N, M]; [N, M / 2] with kSiluMul
  int norm;                   // of X's rows; with -DNORM=1
  float eps, inverse_k;       // of the norm; 1 / K without padding
  int half_atoms;          // atoms of the first half of K, or of all of K
  int* arrivals;              // [row blocks], zero between launches; for halves of K
  float2* partials;           // [2][row blocks][TILES][32]; for halves of K
  const uint8_t* ahead;       // prefetched to L2 for a later launch, a part by each CTA of tier 0
  int ahead_bytes;            // of such a part
  int k_shares;               // with units of 4 bits, or one tile of X: shares of K, 4 or 8
  // With units: both halves of an RMSNorm between products (splitk_norm.cuh); pointers are null
  // where there is none. Squares are [N][row blocks of a row], padded with zeros to whole float4s.
  const float* x_squares;      // sums of squares of the rows that X was scaled from
  float* squares;              // sums of squares of Y
  const Element* next_weight;  // [M], of the norm behind Y
  Element* scaled;             // [N, M]: Y * next_weight * next_factor
  float x_factor, next_factor;  // 1 / next_factor of X's producer; a power of two
  int x_row_blocks;             // partial sums of a row of X
};

__device__ __forceinline__ bool has_halves(const SplitKGemmArgs& args) {
  return kHalves && args.half_atoms < args.k / kAtomK;
}

// Floats between the partial sums of two rows with `row_blocks` each.
__device__ __forceinline__ int squares_stride(int row_blocks) {
  return (row_blocks + 3) / 4 * 4;
}

__device__ __forceinline__ int tier_of_cta(const SplitKGemmArgs& args) {
  int tier = 0;
  while (tier + 1 < args.tier_count && args.order.number() >= args.tiers[tier + 1].first_cta)
    tier++;
  return tier;
}
