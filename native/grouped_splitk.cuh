// The arguments of the grouped SplitK_GEMM, the list of a step's experts, and the items of a CTA.
#pragma once

#include "gemm_common.cuh"

constexpr int kThreads = SPLITK_THREADS;
constexpr int kMaxStages = SPLITK_MAX_STAGES;
constexpr int kMaxExperts = MAX_EXPERTS;
static_assert(kThreads == kConsumers + 2 * 32, "consumers, a producer warp for W and one for X");

// A variant gates its products with -DOUTPUTS=0, adds up those of a token's experts with 1, and
// stores them as they are with 2.
constexpr bool kGates = OUTPUTS == 0, kAdds = OUTPUTS == 1;
// Down's K is short, and its epilogue waits for memory. So its warpgroups take items in turns, one
// in its epilogue while the other multiplies.
constexpr bool kTurns = kAdds && !kHasUnits;
constexpr int kItemRowBlocks = (kTurns ? 1 : kWarpgroups) * kTileRowBlocks;
static_assert(!kHasUnits || TILES <= 2, "units: at most 16 rows of X at a time");
// Of an item whose K is one unit, at most: more of them share its X, and what an item takes besides.
// Adding up the experts takes too much code for several pairs of a warp.
constexpr int kWarps = kConsumers / 32;  // that multiply
constexpr int kOneUnitRowBlocks = kAdds ? 2 * kWarps : kTileRowBlocks * kWarps;

// Atoms along K of a stage, at most. Rows of X in a stage have 16 bytes of padding, so that
// ldmatrix reads 8 of them without bank conflicts.
constexpr int kStageAtoms = TILES <= 2 ? 2 : kUnitAtoms;
constexpr int kXRowBytes = kStageAtoms * kAtomK * 2 + 16;
constexpr int kXStageBytes = (kXRows * kXRowBytes + 127) / 128 * 128;

// X in shared memory as a lane reads it with ldmatrix: [rows][atoms][128 bytes].
struct PaddedX {
  uint32_t at;  // in the current atom

  __device__ __forceinline__ PaddedX(uint32_t x, int lane)
      : at(x + lane % 8 * kXRowBytes + (lane / 8 << 4)) {}
  __device__ __forceinline__ uint32_t chunk(int tile, int half) const {
    return at + 64 * half + tile * 8 * kXRowBytes;
  }
  __device__ __forceinline__ void next_atom() { at += kAtomK * 2; }
};

// Groups of an expert's row blocks follow each other, each stored as [atoms][row blocks]: if K is
// one unit, row blocks follow each other whatever the groups. A tier without CTAs is read by those
// of the first tier, behind their own.
struct GroupedTier {
  int first_row_block;  // of the stacked matrix; the tier ends where the next one begins
  int first_cta;        // likewise
  int group_row_blocks;
  int window;  // congestion window: stages of W that a CTA may have in flight
};

struct GroupedSplitKArgs {
  const uint64_t* addresses;  // [tier_count], in global memory: where each tier's row blocks lie
  const int64_t* shifts;      // [experts]: bytes from each index to its expert; null: 0
  const int* ends;            // [experts]: pairs of the experts up to each
  int tier_count, experts;
  int expert_row_blocks;  // of the matrix [m, k] of an expert
  int k, atoms;           // columns; atoms along them, in whole units
  int stages;
  int stage_row_blocks;  // row blocks times atoms of a stage, at most
  int top_k;             // experts of a token
  CtaOrder order;
  const Element* x;      // [pairs, k]; gates: [tokens, k]
  const int* tokens;     // [pairs]: the token of each; gates and sums
  const float* weights;  // [pairs]: of the expert; sums
  const int* pairs;      // [tokens, top_k]: a token's pairs; sums
  Element* y;            // [pairs, m]; gates: [pairs, m / 2]; sums are added to [tokens, m]
  float* partials;       // [pairs, m]: weighted products; sums
  int* arrivals;         // [tokens, expert_row_blocks], zeros before and after; sums
  GroupedTier tiers[kMaxTiers + 1];  // one more for the last tier's end
};

__device__ __forceinline__ int tier_of_cta(const GroupedSplitKArgs& args) {
  int tier = 0;
  while (tier + 1 < args.tier_count && args.order.number() >= args.tiers[tier + 1].first_cta)
    tier++;
  return tier;
}

// The experts that any row chose, in shared memory.
struct Chosen {
  struct Expert {
    int number, first_pair;
  };
  struct Range {
    int first, last;  // experts of the list with row blocks in a tier, `last` not included
  };
  Expert* experts;  // [all + 1]: the chosen ones, then one for the end of the last one's pairs
  Range* ranges;    // [tiers]

  // Lists them, by a warp. Nothing that runs beside this kernel writes `ends`.
  __device__ __forceinline__ void list(const GroupedSplitKArgs& args) const {
    const int lane = threadIdx.x % 32, height = args.expert_row_blocks;
    constexpr int kPerLane = kMaxExperts / 32;
    int ends[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      const int expert = 32 * i + lane;
      ends[i] = expert < args.experts ? ptx::load_from_l2(args.ends + expert) : 0;
    }
    int count = 0, before = 0;  // experts in the list; the end of the last expert's pairs
    Range of_tier = {0, 0};  // of tier number `lane`
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (32 * i >= args.experts) break;
      const int expert = 32 * i + lane;
      int first = __shfl_sync(0xffffffff, ends[i], max(lane - 1, 0));
      if (lane == 0) first = before;
      const bool chosen = expert < args.experts && ends[i] > first;
      const uint32_t mask = __ballot_sync(0xffffffff, chosen);
      if (chosen) experts[count + __popc(mask & ((1u << lane) - 1))] = {expert, first};
      for (int tier = 0; tier < args.tier_count; tier++) {
        const bool above = (expert + 1) * height <= args.tiers[tier].first_row_block,
                   below = expert * height >= args.tiers[tier + 1].first_row_block;
        const uint32_t skipped = __ballot_sync(0xffffffff, chosen && above),
                       behind = __ballot_sync(0xffffffff, chosen && below);
        if (lane == tier) {
          of_tier.first += __popc(skipped);
          of_tier.last += __popc(mask & ~behind);
        }
      }
      count += __popc(mask);
      before = __shfl_sync(0xffffffff, ends[i], min(31, args.experts - 1 - 32 * i));
    }
    if (lane == 0) experts[count] = {args.experts, before};
    if (lane < args.tier_count) ranges[lane] = of_tier;
  }
};

// The items of a CTA. The row blocks that the chosen experts have in a tier, one expert after the
// other, are divided evenly into a range for each of the tier's CTAs. An item is row blocks of one
// expert in one group, or in any if K is one unit, and up to kXRows of the expert's rows of X; all
// rows of X come before the next row blocks. Producers and consumers each run their own copy of the loop.
struct Items {
  const GroupedSplitKArgs& args;
  const Chosen chosen;
  int tier, number;   // of the current item, and of its expert
  int row_blocks;     // of the item
  int row_block;      // the first one, counted in its expert
  int stored_in;      // row blocks of its group that are in its tier
  int64_t first_atom;  // number of the first one's first atom in its tier
  int stage_atoms;    // of the item's stages
  int pair, pairs;    // the item's first row of X, and the number of its rows

  __device__ __forceinline__ Items(const GroupedSplitKArgs& args, const Chosen& chosen, int tier)
      : args(args), chosen(chosen), own(tier) {
    enter(tier);
  }
  __device__ __forceinline__ bool done() const { return tier >= args.tier_count; }
  // Whether the item's row blocks are read for the last time.
  __device__ __forceinline__ bool last_rows() const { return pair + kXRows >= last_pair; }
  __device__ __forceinline__ void next() {
    if (!last_rows()) return set_rows(pair + kXRows);
    at += row_blocks;
    if (at < stop) return locate();
    enter(tier + 1);
  }

 private:
  const int own;       // the tier of this CTA
  int at, stop;        // in the row blocks of the chosen experts in the tier
  int first, skipped;  // the list's first expert in the tier; its row blocks ahead of the tier
  int last_pair;       // behind the expert's last

  __device__ __forceinline__ bool one_unit() const {
    return kHasUnits && args.atoms == kUnitAtoms;
  }
  // Goes to the CTA's range in the first tier from `number` on in which it has one.
  __device__ __forceinline__ void enter(int number) {
    for (tier = number; tier < args.tier_count; tier++) {
      const GroupedTier &of = args.tiers[tier], &behind = args.tiers[tier + 1];
      const bool without_ctas = of.first_cta == behind.first_cta;
      if (tier != own && !(own == 0 && without_ctas)) continue;
      const int height = args.expert_row_blocks;
      const Chosen::Range range = chosen.ranges[tier];
      if (range.first >= range.last) continue;
      first = range.first;
      skipped = max(0, of.first_row_block - chosen.experts[first].number * height);
      const int end = (chosen.experts[range.last - 1].number + 1) * height;
      const int all = (range.last - first) * height - skipped - max(0, end - behind.first_row_block);
      const int of_tier = args.tiers[own].first_cta;
      const int cta = args.order.number() - of_tier, ctas = args.tiers[own + 1].first_cta - of_tier;
      const int each = quotient(all, ctas), more = all - each * ctas;
      at = cta * each + min(cta, more);
      stop = at + each + (cta < more);
      // Whole groups, where the busiest CTA gets no more of them, or hardly: an item takes its X, its
      // sums, and with a K of one unit more time than its products.
      const int group = of.group_row_blocks, groups = quotient(all + group - 1, group);
      const int whole = quotient(groups + ctas - 1, ctas) * group;
      const int slack = one_unit() ? each / kItemRowBlocks : 0;
      if (whole <= each + (more > 0) + slack) at = cta * whole, stop = min(at + whole, all);
      if (at < stop) return locate();
    }
  }
  __device__ __forceinline__ void locate() {
    const int height = args.expert_row_blocks, index = quotient(at + skipped, height);
    const GroupedTier& of = args.tiers[tier];
    const Chosen::Expert* const expert = chosen.experts + first + index;
    row_block = at + skipped - index * height;
    number = expert->number;
    // The group's row blocks that are in the tier, counted in the expert.
    const int before = of.first_row_block - number * height,
              behind = args.tiers[tier + 1].first_row_block - number * height;
    const int size = one_unit() ? height : of.group_row_blocks;
    const int group = quotient(row_block, size) * size, begin = max(group, before);
    stored_in = min(min(group + size, height), behind) - begin;
    const int most = one_unit() ? min(args.stage_row_blocks / kUnitAtoms, kOneUnitRowBlocks)
                                : kItemRowBlocks;
    row_blocks = min(min(begin + stored_in - row_block, stop - at), most);
    first_atom =
        static_cast<int64_t>(begin - before) * args.atoms + (row_block - begin) * kUnitAtoms;
    stage_atoms = kStageAtoms;
    while (stage_atoms > kUnitAtoms && stage_atoms * row_blocks > args.stage_row_blocks)
      stage_atoms /= 2;
    last_pair = expert[1].first_pair;
    set_rows(expert->first_pair);
  }
  __device__ __forceinline__ void set_rows(int number) {
    pair = number;
    pairs = min(kXRows, last_pair - pair);
  }
};
