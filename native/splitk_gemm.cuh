// What SplitK_GEMM works on: its arguments, how its warps share a block, the stages of a CTA, the
// sums of a thread and the share of a warp.
#pragma once

#include "common.cuh"
#include "element.cuh"

constexpr int kMaxTiers = 9;
constexpr int kMaxStages = 16;
constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kOctetRows = 8;
constexpr int kAtomK = 64;
constexpr int kAtomBytes = kOctetRows * kAtomK * 2;

// One cubin per dtype and N: -DBFLOAT16 is 0 or 1, N <= 8 * X_TILES.
constexpr int kXRows = 8 * X_TILES;
constexpr int kXAtomBytes = kXRows * kAtomK * 2;
constexpr int kTeams = 2;
constexpr int kKWarps = X_TILES <= 2 ? 4 : X_TILES == 4 ? 2 : 1;  // of a team, that share k,
constexpr int kOctetWarps = X_TILES <= 2 ? 1 : 2;                 // octets,
constexpr int kRowWarps = X_TILES == 8 ? 2 : 1;                   // and rows of X
constexpr int kTeamWarps = kKWarps * kOctetWarps * kRowWarps;
static_assert(kTeams * kTeamWarps == kConsumerWarps, "every warp has its share");
constexpr int kMaxOctets = 8;  // of a group
constexpr int kWarpOctets = kMaxOctets / kOctetWarps;
constexpr int kWarpTiles = X_TILES / kRowWarps;  // of 8 rows of X
constexpr int kWarpK = X_TILES <= 2 ? 32 : 64;   // of an atom
constexpr int kBlockK = kKWarps * kWarpK;        // what a team takes at a time
constexpr int kBlockAtoms = kBlockK / kAtomK;
constexpr int kTileBytes = 256;  // sums of a warp: an octet by 8 rows of X

// The race checker takes no account of __syncwarp(), so under it every lane arrives for itself.
#if RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

__device__ __forceinline__ bool arrives_for_warp() {
  return kArrivalsOfWarp == 32 || threadIdx.x % 32 == 0;
}

extern __shared__ __align__(1024) uint8_t smem[];

enum Activation : int { kNone = 0, kRelu = 1, kSiluMul = 2 };

// Of its octets a tier's CTAs take groups in turn: CTA c the groups c, c + CTAs, ... What they take
// at a time, a wave, is stored by steps of k, each step by groups, so that CTAs side by side read
// memory side by side. A group's step is [atoms along k][octets], 1 KiB each.
struct Tier {
  const uint8_t* base;
  int first_octet;  // octets of this tier: to the next tier's first
  int first_cta;
  int group_octets;  // at most kMaxOctets; the tier's last group may have fewer
  int step_k;        // a multiple of 128
  int window;        // stages of W that a CTA may have in flight
};

struct SplitKGemmArgs {
  TensorMap x;                // [K / 64][N][64], box of x_atoms x kXRows x 64, 128-byte swizzle
  Tier tiers[kMaxTiers + 1];  // one more, for the ends
  const Element* bias;        // [M], or null
  const Element* residual;    // [N, M], or null; not with kSiluMul
  Element* y;                 // [N, M]; [N, M / 2] with kSiluMul, see there
  int m, n, k;                // k counts the padding, a multiple of 128
  int tier_count;
  int stages;
  int stage_blocks;  // of kBlockK: an even number, or 1, and then `stages` is even
  int stage_octets;  // that a stage has room for
  int stage_bytes;   // of W and X
  int x_atoms;       // that a copy of X brings; 1: the map is [1][N][K], K being ragged
  int activation;
};

__device__ __forceinline__ int tier_of_cta(const SplitKGemmArgs& args) {
  int tier = 0;
  while (tier + 1 < args.tier_count && blockIdx.x >= args.tiers[tier + 1].first_cta)
    tier++;
  return tier;
}

// The stages of a CTA, one after the other: a group of octets, all its k, the next group.
struct Cursor {
  int stage_k, k_end, group_octets, wave_octets, tier_octets;
  int octet, k = 0;

  __device__ __forceinline__ Cursor(const SplitKGemmArgs& args, int number)
      : stage_k(args.stage_blocks * kBlockK), k_end(args.k) {
    const Tier &tier = args.tiers[number], &next = args.tiers[number + 1];
    group_octets = tier.group_octets;
    wave_octets = (next.first_cta - tier.first_cta) * group_octets;
    tier_octets = next.first_octet - tier.first_octet;
    octet = (static_cast<int>(blockIdx.x) - tier.first_cta) * group_octets;
  }
  __device__ __forceinline__ bool done() const { return octet >= tier_octets; }
  __device__ __forceinline__ int octets() const { return min(group_octets, tier_octets - octet); }
  __device__ __forceinline__ int blocks() const { return min(stage_k, k_end - k) / kBlockK; }
  __device__ __forceinline__ void next_group() { octet += wave_octets; }
  __device__ __forceinline__ void next_stage() {
    k += stage_k;
    if (k < k_end) return;
    k = 0;
    next_group();
  }
};

// Sums of one thread, lane 4g + t: of row g of an octet with the rows 2t (x) and 2t + 1 (y) of 8
// rows of X.
struct Sums {
  float2 tile[kWarpOctets][kWarpTiles] = {};
};

// What a warp computes of a group: some k of its team's blocks, `count` octets from `first` on, and
// rows of X from `first_row` on.
struct Share {
  int k, first, count, first_row;

  __device__ __forceinline__ Share(int warp, int octets) {
    const int member = warp % kTeamWarps;
    const int most = (octets + kOctetWarps - 1) / kOctetWarps;
    k = member % kKWarps;
    first = min(member / kKWarps % kOctetWarps * most, octets);
    count = min(most, octets - first);
    first_row = member / (kKWarps * kOctetWarps) * kWarpTiles * 8;
  }
};
