// Which groups of row blocks a CTA of SplitK_GEMM computes, in which order, and which part of K.
//
//   OneTier      a tier's CTAs take its groups; each CTA is in one of four modes:
//     whole_groups         one group at a time, all of K
//     two_waves            two groups a stage, so that X is read once for both
//     half_of_two_groups   halves of K: two groups a stage, one half
//     both_halves          halves of K without a neighbour: one group, its halves in turn
//   MixedTiers   the first tier's CTAs take whole groups of their own tier and of a remote one
//
// Both have the same members. Producers and consumers each run their own copy of the loop.
#pragma once

#include "splitk_gemm.cuh"

struct OneTier {
  const SplitKGemmArgs& args;
  // Atoms along K of a stage; the CTA's range of K in atoms, which k_middle may divide in two.
  int stage_atoms, k_begin = 0, k_middle, k_end, group_row_blocks;
  int tier, first_row_block, tier_row_blocks, wave_row_blocks;  // the current group's tier
  int second = 0;         // row blocks from a group to the second one of its stages, or 0
  int row_block, stride;  // the current group, counted in its tier, and the way to the next one
  int k;                  // the current stage's first atom

  __device__ __forceinline__ OneTier(const SplitKGemmArgs& args, int number)
      : args(args), k_middle(args.k / kAtomK), k_end(args.k / kAtomK) {
    const Tier &own = args.tiers[number], &next = args.tiers[number + 1];
    const int cta = args.order.number() - own.first_cta, ctas = next.first_cta - own.first_cta;
    stage_atoms = own.stage_atoms;
    group_row_blocks = own.group_row_blocks;
    enter(number);
    whole_groups(cta);
    const bool halves = has_halves(args), two = kPairs && own.groups == 2;
    if (two && !halves) {
      two_waves();
    } else if (two && (cta | 1) < ctas) {
      half_of_two_groups(cta);
    } else if (halves) {
      both_halves();
    }
    k = k_begin;
  }
  __device__ __forceinline__ bool done() const { return row_block >= tier_row_blocks; }
  __device__ __forceinline__ bool last_group() const {
    return row_block + stride >= tier_row_blocks;
  }
  // Row blocks of the stage's first or second group; zero or less where there is none.
  __device__ __forceinline__ int row_blocks(int group = 0) const {
    if (group && second == 0) return 0;
    return min(group_row_blocks, tier_row_blocks - row_block - group * second);
  }
  // The atom behind the current part of K.
  __device__ __forceinline__ int k_stop() const {
    return k < k_middle ? min(k_middle, k_end) : k_end;
  }
  // Goes to the next part of K, or to the next group.
  __device__ __forceinline__ void next_group() {
    k = k_stop();
    if (k < k_end) return;
    k = k_begin;
    row_block += stride;
  }

 protected:
  __device__ __forceinline__ void enter(int number) {
    tier = number;
    first_row_block = args.tiers[tier].first_row_block;
    tier_row_blocks = args.tiers[tier + 1].first_row_block - first_row_block;
    wave_row_blocks = args.tiers[tier].wave_row_blocks;
  }

 private:
  // Group `cta` of every wave.
  __device__ __forceinline__ void whole_groups(int cta) {
    stride = wave_row_blocks;
    row_block = cta * group_row_blocks;
  }
  // The same groups, those of two waves at a time.
  __device__ __forceinline__ void two_waves() {
    second = wave_row_blocks;
    stride = 2 * wave_row_blocks;
  }
  // The groups of two neighbouring CTAs, of which each takes one half of K.
  __device__ __forceinline__ void half_of_two_groups(int cta) {
    second = group_row_blocks;
    row_block = (cta & ~1) * group_row_blocks;
    (cta % 2 ? k_begin : k_end) = args.half_atoms;
  }
  // One half of K after the other.
  __device__ __forceinline__ void both_halves() { k_middle = args.half_atoms; }
};

// Groups of both tiers are numbered together; CTA c takes the groups c, c + CTAs, ... Those of the
// remote tier are spread evenly among the numbers, so that no SM reads from the link only.
struct MixedTiers : OneTier {
  const int own_tier;  // whose CTA this is
  int group;           // the current group's number

  __device__ __forceinline__ MixedTiers(const SplitKGemmArgs& args, int number)
      : OneTier(args, number), own_tier(number) {
    locate(args.order.number() - args.tiers[own_tier].first_cta);
  }
  __device__ __forceinline__ bool last_group() const { return group + ctas() >= all_groups(); }
  __device__ __forceinline__ void next_group() {
    k = 0;
    locate(group + ctas());
  }

 private:
  __device__ __forceinline__ int ctas() const {
    return args.tiers[own_tier + 1].first_cta - args.tiers[own_tier].first_cta;
  }
  __device__ __forceinline__ int all_groups() const { return args.tiers[own_tier].all_groups; }
  // Finds the tier and the row blocks of a group; behind the last one, done() is true.
  __device__ __forceinline__ void locate(int number) {
    group = number;
    const int all = all_groups(), mixed = args.tiers[own_tier].mixed_groups;
    const int mixed_before = group * mixed / all;
    const bool is_mixed = (group + 1) * mixed >= (mixed_before + 1) * all;
    enter(is_mixed ? args.mixed_tier : own_tier);
    row_block = group < all ? (is_mixed ? mixed_before : group - mixed_before) * group_row_blocks
                            : tier_row_blocks;
  }
};

template <bool mixes>
struct SchedulerOf {
  using Type = OneTier;
};
template <>
struct SchedulerOf<true> {
  using Type = MixedTiers;
};
using Scheduler = SchedulerOf<kMixes>::Type;

// Goes to the next stage; true where that begins another group, or another part of K.
__device__ __forceinline__ bool next_stage(Scheduler& at) {
  const bool last = at.k + at.stage_atoms >= at.k_stop();
  if (last) {
    at.next_group();
  } else {
    at.k += at.stage_atoms;
  }
  return last;
}
