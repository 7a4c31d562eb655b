// The arguments of the tiled GEMM, and the coordinates of a CTA in its tier and its cluster.
#pragma once

#include "gemm_common.cuh"

// With -DGROUPED=1 the variant is that of grouped_tiled.cu.
#ifndef GROUPED
#define GROUPED 0
#endif
constexpr bool kGrouped = GROUPED;
// CTAs of a launch that share an SM. With two, their warps hide each other's latencies.
#ifndef CTAS_PER_SM
#define CTAS_PER_SM 1
#endif
// Tall tiles have all rows of X of nearly every expert, and multiply as many as there are.
#define TALL (GROUPED && WGMMA && !WIDE && !CODE && TILES > 8)

static_assert(kWarpgroups == 2, "row_groups are 1 or 2");
static_assert(TILES % (WIDE ? 4 : 8) == 0 && TILES <= (TALL ? 40 : 32), "accumulators fit");

constexpr int kTiledThreads = TILED_THREADS;
static_assert(kTiledThreads == kConsumers + kWarpgroup, "consumers, and a warpgroup of producers");
constexpr int kConsumerWarps = kConsumers / 32;
constexpr bool kClusters = CLUSTERS && !kGrouped;
constexpr int kMaxStages = TILED_MAX_STAGES;
// Registers of a thread: producers give theirs to consumers. A CTA that wanted more than its launch
// got would wait for them forever.
constexpr int kCtasOfSm = CTAS_PER_SM;
static_assert(kCtasOfSm == 1 || kHasUnits && WGMMA && TILES <= 8, "registers suffice");
constexpr int kProducerRegisters = kCtasOfSm == 2                ? kGrouped ? 56 : 32
                                   : !kGrouped                   ? 40
                                   : kHasUnits || TALL           ? 56
                                                                 : 48;
constexpr int kConsumerRegisters = kCtasOfSm == 2                ? kGrouped ? 88 : 104
                                   : !kGrouped                   ? 232
                                   : kHasUnits || TALL           ? 216
                                                                 : 224;
constexpr int kLaunchRegisters = 65536 / kCtasOfSm / kTiledThreads / 8 * 8;
static_assert(kProducerRegisters * kWarpgroup + kConsumerRegisters * kConsumers <=
              kLaunchRegisters * kTiledThreads);

constexpr int kUnitStages = kHasUnits ? TILED_UNIT_STAGES : 0;

// How a tier's own clusters compute its row blocks. A cluster's tile consists of its CTAs' tiles.
// A tier may hold several parts of the matrix, each packed by itself; tiles cross their borders.
struct TierTiles {
  int first_row_block;  // of the matrix; the tier ends where the next one begins
  int first_cluster;    // likewise
  int clusters;
  int row_groups;        // 2: warpgroups are side by side along W; 1: along X
  int tile_row_blocks;   // of W in a CTA's tile, at most row_groups * kTileRowBlocks
  int w_tiles, x_tiles;  // clusters' tiles along W and along X
  int block_tiles;       // tiles along X that follow each other in the order of tiles
  int waves;             // data-parallel waves: a tile for each cluster; Stream-K shares the rest
  int stages;            // at least 2, so that one can be freed while another is read
  int window;            // congestion window: stages of W in flight, of CTAs that share them
};

// Bytes of the ring of units of a CTA, a multiple of 1 KiB, to which the stages behind it are
// aligned.
__device__ __forceinline__ int ring_of_units(const TierTiles& tier) {
  return (kUnitStages * tier.tile_row_blocks * kUnitBytes + 1023) / 1024 * 1024;
}

// What this launch waits for, and when the next one may start (programmatic dependent launch).
enum Order : int {
  kAlone = 0,        // waits for the predecessor; the next launch may start at once
  kBeforeLocal = 1,  // waits, then lets the same op's launch for the local tier start
  kAfterRemote = 2,  // that launch: need not wait, since its inputs were complete when it started
};

struct TiledGemmArgs {
  // [1][N][K], 128-byte swizzle: boxes of 1 x box_rows x 64, and of 1 x rest_rows x 64.
  TensorMap x, x_rest;
  TensorMap y_boxes;  // [N][width], box of a block of outputs
  int boxes;          // whether y_boxes is there; not with kSiluMul
  int m, n;
  // Rows of X in a box. w_ctas boxes of box_rows hold a warpgroup's rows, w_ctas of rest_rows the
  // last ones, which are fewer; rest_rows is 0 if there are none. Grouped: boxes of box_rows hold a
  // tile's rows, and boxes of rest_rows the last ones.
  int box_rows, rest_rows;
  int activation;
  int order;
  // CTAs of a cluster: w_ctas side by side along W share X, of which each loads a part; x_ctas
  // along X share W, which they load round-robin; one of these two is 1. k_ctas split K.
  int w_ctas, x_ctas, k_ctas;
  int segment_atoms;               // atoms along K of each of k_ctas
  int output_blocks;               // of a warp, in shared memory
  int width;                       // of Y: M, or with kSiluMul M / 2
  const Element* bias;             // [M], or null
  const Element* residual;         // [N, M], or null; not with kSiluMul
  Element* y;                      // [N, width]
  float4* partials;                // [CTAs][TILES][kConsumers]: Stream-K's partial tiles
  int* partial_flags;              // [CTAs][warps]: 1 if stored; zero between launches
  TierTiles tiers[kMaxTiers + 1];  // one more for the last tier's end
  PackedMatrix weight;             // [M, K]
#if GROUPED
  const int* ends;                 // [experts]: rows of X up to the end of each expert's
  int* taken;                      // [tiers]: tiles taken from a counter; zero between launches
  const int64_t* shifts;           // [experts]: bytes from each index to its expert; null: 0
  int experts, expert_row_blocks;  // the matrices that W stacks
  int listed;                      // whether `ends` was complete when the launch started
  int cols;                        // K
  const Element* rows;             // [N, cols]: X
  int x_rows;                      // of X that a tile has at most: room in a stage
#endif
};

// Rows of X that a CTA's tile has at most.
__device__ __forceinline__ int x_rows_of(const TiledGemmArgs& args, const TierTiles& tier) {
#if GROUPED
  return args.x_rows;
#else
  return (kWarpgroups + 1 - tier.row_groups) * kXRows;
#endif
}

// Whether the CTAs of a cluster split K.
__device__ __forceinline__ bool splits_k(const TiledGemmArgs& args) {
  return kClusters && args.k_ctas > 1;
}

// The tier of a cluster. weight.tier_count counts the matrix's parts. Where several parts are one
// tier, the last entries of `tiers` are unused, and begin behind the last cluster.
__device__ __forceinline__ int tier_of(const TiledGemmArgs& args, int cluster) {
  int tier = 0;
  while (tier + 1 < args.weight.tier_count && cluster >= args.tiers[tier + 1].first_cluster)
    tier++;
  return tier;
}

// Fetches the parameters into the constant cache, a line by each warp: all at once instead of one
// after the other when they are needed.
__device__ __forceinline__ void fetch_parameters(const TiledGemmArgs& args) {
  constexpr int kWords = (sizeof args - 3 * sizeof(TensorMap)) / sizeof(int);
  const int line = threadIdx.x / 32 * (64 / sizeof(int));
  if (line < kWords) ptx::fetch_parameter((&args.boxes)[line]);
}

// A CTA's tier, its cluster among the tier's, and its rank in the cluster: ranks of CTAs that share
// W or X follow each other, those along K are `sharers` apart.
struct CtaCoord {
  int tier, cluster;
  int sharers, sharer;  // CTAs that share W or X, and which one of them this is
  int segment;          // of K
  int first_sharer;     // its rank

  __device__ __forceinline__ explicit CtaCoord(const TiledGemmArgs& args)
      : tier(tier_of(args, ptx::cluster_number())),
        cluster(ptx::cluster_number() - args.tiers[tier].first_cluster),
        sharers(kClusters ? args.w_ctas * args.x_ctas : 1) {
    const int rank = ptx::cluster_rank();
    sharer = rank & sharers - 1;  // they are a power of two
    first_sharer = rank - sharer;
    segment = quotient(first_sharer, sharers);
  }
  // The CTAs that multicast copies go to.
  __device__ __forceinline__ uint16_t multicast_mask() const {
    return static_cast<uint16_t>(((1u << sharers) - 1) << first_sharer);
  }
};
