// What SplitK_GEMM works on: its arguments, and the stages of a CTA.
#pragma once

#include "gemm_common.cuh"

constexpr int kMaxStages = SPLITK_MAX_STAGES;

// With -DNORM=1 X is normalised, with -DMIXES=1 the first tier's CTAs take groups of another, too.
constexpr bool kPairs = X_TILES == 8;  // X is then so large that it counts how often it is read
constexpr bool kHalves = kPairs && !NORM;
constexpr bool kMixes = MIXES;
static_assert(!kMixes || !kPairs, "two groups at once are a tier's own");

enum Norm : int { kRmsNorm = 1, kLayerNorm = 2 };

// Of its row blocks a tier's CTAs take groups in turn: CTA c the groups c, c + CTAs, ... What they
// take at a time, a wave, is stored by steps of k, each step by groups, so that CTAs side by side
// read memory side by side. A group's step is [atoms along k][row blocks], 1 KiB each. One remote
// tier may have no CTAs: the first tier's then take its groups among their own.
struct Tier {
  const uint8_t* base;
  int first_row_block;  // row blocks of this tier: to the next tier's first
  int first_cta;
  int wave_row_blocks;
  int group_row_blocks;  // at most kWarpgroups * kTileRowBlocks; fewer in a tier's last group
  int step_atoms;        // a multiple of what a stage has
  int stage_atoms;       // a multiple of x_atoms
  int stages;            // 2 or more: one is free when the next is read
  int window;            // stages of W that a CTA may have in flight
  int x_boxes;           // copies of X for a stage
  int group_stages;      // that a whole group takes
  int groups;            // that stages have: with kPairs two, of up to kTileRowBlocks
  // With kMixes: what its CTAs go through, and how many of these are the mixed tier's.
  int all_groups, mixed_groups;
};

// What a CTA needs first lies together, as every line of it is fetched anew at each launch.
struct SplitKGemmArgs {
  TensorMap x;  // [K / 64][N][64], box of x_atoms x kXRows x 64, 128-byte swizzle
  int tier_count;
  int m, n, k;  // k counts the padding, a multiple of 64
  int x_atoms;  // that a copy of X brings; if it is 1, the map is [1][N][K], and K may be ragged
  int activation;
  CtaOrder order;
  int mixed_tier;             // whose groups are the first one's CTAs'
  const Element* bias;        // [M], or null
  Tier tiers[kMaxTiers + 1];  // one more, for the ends
  const Element* residual;    // [N, M], or null; not with kSiluMul
  Element* y;                 // [N, M]; [N, M / 2] with kSiluMul, see there
  int norm;                   // of X's rows; with -DNORM=1
  float eps, inverse_k;       // of the norm; 1 / K, where K does not count the padding
  int half;                   // atoms along k of a sum's first half: all, or with kHalves fewer
  int* arrivals;              // [row blocks], zero between launches; with halves
  float2* halves;             // [2][row blocks][X_TILES][32], see there
  const uint8_t* ahead;       // what a launch soon reads, a part for each of the first tier's CTAs
  int ahead_bytes;            // of such a part
};

__device__ __forceinline__ bool has_halves(const SplitKGemmArgs& args) {
  return kHalves && args.half < args.k / kAtomK;
}

__device__ __forceinline__ int tier_of_cta(const SplitKGemmArgs& args) {
  int tier = 0;
  while (tier + 1 < args.tier_count && args.order.number() >= args.tiers[tier + 1].first_cta)
    tier++;
  return tier;
}

// The stages of a CTA, one after the other: a group of row blocks, or two, all its k, the next
// group. Counts atoms along k. Two groups are those of two waves. Where sums have halves, they are
// the CTA's and the next one's, of which each takes one half of both; a CTA that has none beside it
// takes both halves of its own, one after the other.
struct Cursor {
  const SplitKGemmArgs& args;
  const int own_tier;  // whose CTA it is
  int stage_atoms, k_begin = 0, k_middle, k_end, group_row_blocks;
  int number, first_row_block, tier_row_blocks, wave_row_blocks;  // the group's tier
  int group;       // with kMixes: its number, of both tiers' groups
  int second = 0;  // row blocks from a group to the one that stages have as well, or 0
  int row_block, stride, k;

  __device__ __forceinline__ Cursor(const SplitKGemmArgs& args, int of_tier)
      : args(args), own_tier(of_tier), k_middle(args.k / kAtomK), k_end(args.k / kAtomK) {
    const Tier &tier = args.tiers[of_tier], &next = args.tiers[of_tier + 1];
    const int cta = args.order.number() - tier.first_cta;
    const int ctas = next.first_cta - tier.first_cta;
    stage_atoms = tier.stage_atoms;
    group_row_blocks = tier.group_row_blocks;
    enter(of_tier);
    stride = wave_row_blocks;
    row_block = cta * group_row_blocks;
    const bool halves = has_halves(args), two = kPairs && tier.groups == 2;
    if (two && !halves) {
      second = wave_row_blocks;
      stride = 2 * wave_row_blocks;
    } else if (two && (cta | 1) < ctas) {
      second = group_row_blocks;
      row_block = (cta & ~1) * group_row_blocks;
      (cta % 2 ? k_begin : k_end) = args.half;
    } else if (halves) {
      k_middle = args.half;
    }
    k = k_begin;
    if (kMixes) find(cta);
  }
  __device__ __forceinline__ bool done() const { return row_block >= tier_row_blocks; }
  __device__ __forceinline__ bool last_group() const {
    return kMixes ? group + ctas() >= all_groups() : row_block + stride >= tier_row_blocks;
  }
  // Of the first or the second group, which may have none or less.
  __device__ __forceinline__ int row_blocks(int group = 0) const {
    if (group && second == 0) return 0;
    return min(group_row_blocks, tier_row_blocks - row_block - group * second);
  }
  __device__ __forceinline__ int end() const { return k < k_middle ? min(k_middle, k_end) : k_end; }
  __device__ __forceinline__ void next_group() {
    k = end();
    if (k < k_end) return;
    k = k_begin;
    if (kMixes) {
      find(group + ctas());
    } else {
      row_block += stride;
    }
  }
  // True where that is the next group's.
  __device__ __forceinline__ bool next_stage() {
    const bool last = k + stage_atoms >= end();
    if (last) {
      next_group();
    } else {
      k += stage_atoms;
    }
    return last;
  }

 private:
  __device__ __forceinline__ void enter(int tier) {
    number = tier;
    first_row_block = args.tiers[tier].first_row_block;
    tier_row_blocks = args.tiers[tier + 1].first_row_block - first_row_block;
    wave_row_blocks = args.tiers[tier].wave_row_blocks;
  }
  __device__ __forceinline__ int ctas() const {
    return args.tiers[own_tier + 1].first_cta - args.tiers[own_tier].first_cta;
  }
  __device__ __forceinline__ int all_groups() const { return args.tiers[own_tier].all_groups; }
  // Goes to a group, among which those of the mixed tier lie evenly.
  __device__ __forceinline__ void find(int number_of_group) {
    group = number_of_group;
    const int all = all_groups(), mixed = args.tiers[own_tier].mixed_groups;
    const int before = group * mixed / all;
    const bool is_mixed = (group + 1) * mixed >= (before + 1) * all;
    enter(is_mixed ? args.mixed_tier : own_tier);
    row_block =
        group < all ? (is_mixed ? before : group - before) * group_row_blocks : tier_row_blocks;
  }
};
