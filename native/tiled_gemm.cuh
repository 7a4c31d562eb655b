// What the tiled GEMM works on: its arguments, and the tiles of a CTA.
#pragma once

#include "gemm_common.cuh"

static_assert(X_TILES % 8 == 0 && X_TILES <= 32, "rows of X by 64, at most 256 a warpgroup");

constexpr int kMaxStages = 8;
constexpr int kPassRows = 64;  // of X, whose outputs a warpgroup stages at a time
constexpr int kStagingBytes = kPassRows * kTileOctets * kOctetRows * 2;  // of a warpgroup

// How a tier's octets are computed, by CTAs of its own.
struct TierTiles {
  int first_cta;    // CTAs of this tier: to the next one's
  int row_groups;   // warpgroups along W: 2, or 1, and the other one has the next rows of X
  int tile_octets;  // of W in a tile, at most row_groups * kTileOctets; the last one may have fewer
  int block_tiles;  // tiles along X that are beside each other in their order
  int stages;       // 2 or more: one is free when the next is read
  int window;       // stages of W that a CTA may have in flight
};

struct TiledGemmArgs {
  TensorMap x;  // [1][N][K], box of 1 x kXRows x 64, 128-byte swizzle
  int m, n;
  int activation;
  int width;                       // of y: M, or with kSiluMul M / 2
  const Element* bias;             // [M], or null
  const Element* residual;         // [N, M], or null; not with kSiluMul
  Element* y;                      // [N, width]
  TierTiles tiers[kMaxTiers + 1];  // one more, for the end
  PackedMatrix weight;             // [M, K]
};

__device__ __forceinline__ int tier_of_cta(const TiledGemmArgs& args) {
  int tier = 0;
  while (tier + 1 < args.weight.tier_count && blockIdx.x >= args.tiers[tier + 1].first_cta)
    tier++;
  return tier;
}

// The tiles of a CTA, one after the other: CTA c has the tiles c, c + CTAs, ... of its tier. They
// are numbered along X, in blocks of some, then along W: so those that CTAs compute at a time read
// few rows of W and of X, which L2 then has for all of them.
struct Tiles {
  const TiledGemmArgs& args;
  int tier, number;
  int octet, octets;  // of W, counted from the matrix's first; behind the last tile none or less
  int n;              // the first row of X

  __device__ __forceinline__ Tiles(const TiledGemmArgs& args, int tier)
      : args(args), tier(tier), number(static_cast<int>(blockIdx.x) - args.tiers[tier].first_cta) {
    locate();
  }
  __device__ __forceinline__ bool done() const { return octets <= 0; }
  __device__ __forceinline__ void next() {
    number += args.tiers[tier + 1].first_cta - args.tiers[tier].first_cta;
    locate();
  }

 private:
  __device__ __forceinline__ void locate() {
    tier = ptx::anew(tier);  // else all below would stay in registers
    const TierTiles& of = args.tiers[tier];
    const int begin = args.weight.tiers[tier].first_octet;
    const int end = args.weight.tiers[tier + 1].first_octet;
    const int w_tiles = (end - begin + of.tile_octets - 1) / of.tile_octets;
    const int x_rows = kWarpgroups / of.row_groups * kXRows;
    const int x_tiles = (args.n + x_rows - 1) / x_rows;
    const int whole = w_tiles * of.block_tiles, block = number / whole, in_block = number % whole;
    const int before = block * of.block_tiles, width = min(of.block_tiles, x_tiles - before);
    octets = 0;
    if (width <= 0) return;
    octet = begin + in_block / width * of.tile_octets;
    octets = min(of.tile_octets, end - octet);
    n = (before + in_block % width) * x_rows;
  }
};
