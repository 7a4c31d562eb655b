// What the tiled GEMM works on: its arguments, and the tiles of a CTA.
#pragma once

#include "gemm_common.cuh"

static_assert(kWarpgroups == 2, "row_groups are 1 or 2");
static_assert(X_TILES % (WIDE ? 4 : 8) == 0 && X_TILES <= 32, "at most 256 rows a warpgroup");

constexpr int kTiledThreads = TILED_THREADS;  // of the last warpgroup two warps copy
static_assert(kTiledThreads == kConsumers + kWarpgroup, "a warpgroup beside those that multiply");
// A thread that multiplies takes registers from those that do not.
constexpr int kCopyRegisters = 40, kConsumerRegisters = 232;
constexpr int kMaxStages = TILED_MAX_STAGES;

// How a tier's row blocks are computed, by clusters of its own. A cluster's tile is that of its
// CTAs. The matrix may have them in several parts, each packed by itself: tiles go over their
// borders.
struct TierTiles {
  int first_row_block;   // of the matrix; row blocks of this tier: to the next one's
  int first_cluster;     // clusters of this tier, likewise
  int clusters;          // as many
  int row_groups;        // warpgroups along W: 2, or 1, and the other one has the next rows of X
  int tile_row_blocks;   // of W in a CTA's tile, at most row_groups * kTileRowBlocks
  int w_tiles, x_tiles;  // of clusters
  int block_tiles;       // tiles along X that are beside each other in their order
  int rounds;            // in which each cluster takes a tile; it has a share of those then left
  int stages;            // 2 or more: one is free when the next is read
  int window;            // stages of W that CTAs that share them may have in flight
};

// What the launch and those around it wait for.
enum Order : int {
  kOverlaps = 0,     // it waits for those before, while the next one may start
  kBeforeLocal = 1,  // the next one is the same op's, and may start when this has waited
  kAfterRemote = 2,  // the one before is such a one: what this reads is there
};

struct TiledGemmArgs {
  TensorMap x;        // [1][N][K], box of 1 x box_rows x 64, 128-byte swizzle
  TensorMap y_boxes;  // [N][width], boxes as blocks of outputs are
  int boxes;          // whether there is such a map; not with kSiluMul
  int m, n;
  int box_rows;  // w_ctas boxes have a warpgroup's rows of X, or as many of them as there are
  int activation;
  int order;
  // A cluster's CTAs: beside each other along W, which each bring a part of the same X, or along
  // X, which bring the same W in turns, of which w_ctas or x_ctas is 1; and so many along K.
  int w_ctas, x_ctas, k_ctas;
  int segment;                     // atoms that each of k_ctas sums
  int blocks;                      // of a warp's outputs on their way
  int width;                       // of y: M, or with kSiluMul M / 2
  const Element* bias;             // [M], or null
  const Element* residual;         // [N, M], or null; not with kSiluMul
  Element* y;                      // [N, width]
  float4* carried;                 // [CTAs][X_TILES][kConsumers]: sums that another goes on with
  int* flags;                      // [CTAs][warps]: they are there; zero between launches
  TierTiles tiers[kMaxTiers + 1];  // one more, for the end
  PackedMatrix weight;             // [M, K]
};

// The matrix has as many parts as there are tiers, or more; behind the last tier no cluster begins.
__device__ __forceinline__ int tier_of(const TiledGemmArgs& args, int cluster) {
  int tier = 0;
  while (tier + 1 < args.weight.tier_count && cluster >= args.tiers[tier + 1].first_cluster)
    tier++;
  return tier;
}

// Each warp reads a line of the parameters: they then come all at once, and not one after the other
// as they are needed.
__device__ __forceinline__ void fetch_parameters(const TiledGemmArgs& args) {
  constexpr int kWords = (sizeof args - 2 * sizeof(TensorMap)) / sizeof(int);
  const int line = threadIdx.x / 32 * (64 / sizeof(int));
  if (line < kWords) ptx::fetch_parameter((&args.boxes)[line]);
}

// Where a CTA is: its tier, its cluster among the tier's, and its place in there. Those that share
// W or X follow each other, and those along K are `sharers` apart.
struct Place {
  int tier, cluster;
  int sharers, sharer;  // CTAs that share W or X, and which one of them this is
  int segment;          // of K
  int first_sharer;     // its rank in the cluster

  __device__ __forceinline__ explicit Place(const TiledGemmArgs& args)
      : tier(tier_of(args, ptx::cluster_number())),
        cluster(ptx::cluster_number() - args.tiers[tier].first_cluster),
        sharers(args.w_ctas * args.x_ctas) {
    const int rank = ptx::cluster_rank();
    sharer = rank & sharers - 1;  // they are a power of two
    first_sharer = rank - sharer;
    segment = quotient(first_sharer, sharers);
  }
  __device__ __forceinline__ uint16_t mask() const {
    return static_cast<uint16_t>(((1u << sharers) - 1) << first_sharer);
  }
};

// The tiles of a CTA, one after the other: cluster c has the tiles c, c + clusters, ... of its
// tier. They are numbered along X, in blocks of some, then along W: so those that CTAs compute at a
// time read few rows of W and of X, which L2 then has for all of them.
//
// Where that would leave CTAs without work in the end, they share the tiles that are left: one or
// more for each cluster, but less than two. All their atoms in a row are dealt out evenly, so that
// a cluster has the end of one tile, maybe another tile, and the beginning of one, with which it
// starts: it leaves the sums for the next cluster, which goes on with them when it has done all
// else, and need not wait. So sums are those of all atoms in order, as of any other tile.
struct Tiles {
  const TiledGemmArgs& args;
  int tier, cluster, w, x, segment;
  int turn = -1;
  int row_block, row_blocks;  // of W, counted from the matrix's first; there may be none
  int n;                      // the first row of X
  int k, k_end;               // atoms
  bool carried;               // the sums of those before k have been left
  bool leaves;                // the sums are to be left

  __device__ __forceinline__ Tiles(const TiledGemmArgs& args, const Place& place)
      : args(args),
        tier(place.tier),
        cluster(place.cluster),
        w(args.w_ctas > 1 ? place.sharer : 0),
        x(args.w_ctas > 1 ? 0 : place.sharer),
        segment(place.segment) {}

  // Goes to the first tile, or the next; whether there is one.
  __device__ __forceinline__ bool next() {
    turn++;
    return locate();
  }
  __device__ __forceinline__ bool first() const { return turn == 0; }
  __device__ __forceinline__ uint32_t parity() const { return turn & 1; }
  // Whether this is the CTA's last one, where none are shared.
  __device__ __forceinline__ bool last() const { return turn + 1 >= args.tiers[tier].rounds; }

 private:
  __device__ __forceinline__ bool locate() {
    tier = ptx::anew(tier);  // else all below would stay in registers
    const TierTiles& of = args.tiers[tier];
    int number = cluster + turn * of.clusters;
    k = segment * args.segment;
    k_end = min(k + args.segment, args.weight.atoms);
    k = min(k, k_end);
    carried = leaves = false;
    if (turn >= of.rounds) number = share(of);
    if (number >= of.w_tiles * of.x_tiles) return false;
    const int whole = of.w_tiles * of.block_tiles, block = quotient(number, whole);
    const int in_block = number - block * whole, before = block * of.block_tiles;
    const int width = min(of.block_tiles, of.x_tiles - before), row = quotient(in_block, width);
    row_block = of.first_row_block + (row * args.w_ctas + w) * of.tile_row_blocks;
    row_blocks = max(0, min(of.tile_row_blocks, args.tiers[tier + 1].first_row_block - row_block));
    const int x_rows = (kWarpgroups + 1 - of.row_groups) * kXRows;
    n = ((before + in_block - row * width) * args.x_ctas + x) * x_rows;
    return true;
  }

  // The number of a tile, or one behind all.
  __device__ __forceinline__ int share(const TierTiles& of) {
    const int atoms = args.weight.atoms, before = of.rounds * of.clusters;
    const int tiles = of.w_tiles * of.x_tiles, all = (tiles - before) * atoms;
    if (all <= 0) return tiles;
    const int begin = all * cluster / of.clusters, end = all * (cluster + 1) / of.clusters;
    const int first = quotient(begin, atoms), begins = begin - first * atoms;
    const int last = quotient(end, atoms), ends = end - last * atoms;
    const int step = turn - of.rounds - (ends > 0);
    if (step < 0) {
      k_end = ends;
      leaves = true;
      return before + last;
    }
    const int number = first + (begins > 0) + step;
    if (number < last) return before + number;
    if (number > last || begins == 0) return tiles;
    k = begins;
    carried = true;
    return before + first;
  }
};
