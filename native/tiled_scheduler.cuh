// The tiles of a CTA of the tiled GEMM: data-parallel waves first, then Stream-K.
#pragma once

#if GROUPED
#include "grouped_tiled_scheduler.cuh"
#else
#include "tiled_gemm.cuh"

// Where the matrix that a tile belongs to begins, and where its rows of X end.
struct TileBounds {
  static constexpr int first_row_block = 0;

  static __device__ __forceinline__ int n_end(const TiledGemmArgs& args) { return args.n; }
};

// Data-parallel: cluster c takes the tiles c, c + clusters, ... of its tier. Tiles are numbered
// along X, in blocks of `block_tiles`, then along W. So the tiles of a wave read few rows of W and
// of X, and L2 holds these rows for all of them.
//
// Stream-K: where the last wave would leave clusters without work, it and the whole wave before it
// are shared evenly by atoms along K: one tile or more a cluster, but less than two. A cluster has
// the end of one tile, maybe a whole tile, and the beginning of another. It computes the beginning
// first and stores the accumulators as a partial tile. The next cluster does its other work first,
// so that it need not wait, then loads the accumulators and goes on along K. Every output thus adds
// the terms of K in order, as in a data-parallel tile.
struct Tiles : TileBounds {
  const TiledGemmArgs& args;
  int tier, cluster, w, x, segment;
  int turn = -1;
  int row_block, row_blocks;  // of W, counted from the matrix's first; there may be none
  int n;                      // the first row of X
  int k, k_end;               // atoms
  bool loads_partial;         // the accumulators begin as a partial tile
  bool stores_partial;        // they are stored as a partial tile, not to Y

  __device__ __forceinline__ Tiles(const TiledGemmArgs& args, const CtaCoord& cta)
      : args(args),
        tier(cta.tier),
        cluster(cta.cluster),
        w(args.w_ctas > 1 ? cta.sharer : 0),
        x(args.w_ctas > 1 ? 0 : cta.sharer),
        segment(cta.segment) {}

  // Goes to the first tile, or the next; false where there is none.
  __device__ __forceinline__ bool next() {
    turn++;
    return locate();
  }
  __device__ __forceinline__ bool first() const { return turn == 0; }
  __device__ __forceinline__ uint32_t parity() const { return turn & 1; }
  // Whether this is the CTA's last tile, in launches without Stream-K.
  __device__ __forceinline__ bool last() const { return turn + 1 >= args.tiers[tier].waves; }
  // Where a row block of W lies.
  __device__ __forceinline__ RowBlock row_block_at(int row_block) const {
    return RowBlock(args.weight, row_block);
  }

 private:
  __device__ __forceinline__ bool locate() {
    tier = ptx::opaque(tier);  // else all below would stay in registers
    const TierTiles& of = args.tiers[tier];
    int number = data_parallel(of);
    if (turn >= of.waves) number = stream_k(of);
    if (number >= of.w_tiles * of.x_tiles) return false;
    const int whole = of.w_tiles * of.block_tiles, block = quotient(number, whole);
    const int in_block = number - block * whole, before = block * of.block_tiles;
    const int width = min(of.block_tiles, of.x_tiles - before), row = quotient(in_block, width);
    row_block = of.first_row_block + (row * args.w_ctas + w) * of.tile_row_blocks;
    row_blocks = max(0, min(of.tile_row_blocks, args.tiers[tier + 1].first_row_block - row_block));
    const int x_rows = x_rows_of(args, of);
    n = ((before + in_block - row * width) * args.x_ctas + x) * x_rows;
    return true;
  }

  // Takes a whole tile, or, if the cluster splits K, the CTA's segment of it. Returns the tile's
  // number.
  __device__ __forceinline__ int data_parallel(const TierTiles& of) {
    const int number = cluster + turn * of.clusters;
    k = segment * args.segment_atoms;
    k_end = min(k + args.segment_atoms, args.weight.atoms);
    k = min(k, k_end);
    loads_partial = stores_partial = false;
    return number;
  }

  // The cluster's part of the tiles behind the waves; returns a tile's number, or the number of
  // tiles if the cluster is done.
  __device__ __forceinline__ int stream_k(const TierTiles& of) {
    const int atoms = args.weight.atoms, before = of.waves * of.clusters;
    const int tiles = of.w_tiles * of.x_tiles, all = (tiles - before) * atoms;
    if (all <= 0) return tiles;
    // The cluster's part is the atoms `begin` to `end` of all these tiles. It begins `begins` atoms
    // into tile `first` and ends `ends` atoms into tile `last`.
    const int begin = all * cluster / of.clusters, end = all * (cluster + 1) / of.clusters;
    const int first = quotient(begin, atoms), begins = begin - first * atoms;
    const int last = quotient(end, atoms), ends = end - last * atoms;
    const int step = turn - of.waves - (ends > 0);
    // First the beginning of the last tile,
    if (step < 0) {
      k_end = ends;
      stores_partial = true;
      return before + last;
    }
    // then whole tiles,
    const int number = first + (begins > 0) + step;
    if (number < last) return before + number;
    // and the end of the first one.
    if (number > last || begins == 0) return tiles;
    k = begins;
    loads_partial = true;
    return before + first;
  }
};

using TileScheduler = Tiles;  // every warp finds its tiles
#endif
