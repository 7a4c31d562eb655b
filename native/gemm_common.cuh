// What both GEMMs over a packed W share: warp roles, tile sizes, and a thread's accumulators.
#pragma once

#include "common.cuh"
#include "element.cuh"
#include "packed.cuh"

constexpr int kWarpgroups = WARPGROUPS;               // that multiply: the consumers
constexpr int kWarpgroup = 128;                       // threads
constexpr int kConsumers = kWarpgroups * kWarpgroup;  // threads
constexpr int kAtomK = ATOM_COLS;

// One cubin per dtype and tile size. -DBFLOAT16 is 0 or 1. A warpgroup multiplies 64 rows of W by
// 8 * TILES rows of X, or, with -DWIDE=1, 64 rows of X by 8 * TILES rows of W.
#ifndef WIDE
#define WIDE 0
#endif
#ifndef SETS
#define SETS (CODE ? 1 : TILES == 1 ? 4 : TILES == 2 ? 2 : 1)
#endif
constexpr int kXRows = kRowsPerBlock * (WIDE ? TILE_ROW_BLOCKS : TILES);
constexpr int kTileRowBlocks = WIDE ? TILES : TILE_ROW_BLOCKS;
constexpr int kXAtomBytes = kXRows * kAtomK * 2;

// With units, warps of SplitK_GEMM divide K. They exchange partial sums at the start
// of shared memory: a part of 16 rows of W for each warp, twice.
constexpr int kSumsBytes = kHasUnits ? 2 * kConsumers * TILES * 16 : 0;

extern __shared__ __align__(1024) uint8_t smem[];

enum Activation : int { kNone = 0, kRelu = 1, kSiluMul = 2 };

// NaN stays NaN, so that damaged weights show in the logits.
__device__ __forceinline__ float2 relu(float2 pair) {
  return {ptx::max_nan(pair.x, 0.0f), ptx::max_nan(pair.y, 0.0f)};
}

__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// X in shared memory as a lane reads it with ldmatrix: [atoms][rows][128 bytes], whose chunks of 16
// bytes are swizzled. Every 8 lanes read 8 more columns.
struct SwizzledX {
  uint32_t at;  // in the current atom

  __device__ __forceinline__ SwizzledX(uint32_t x, int lane)
      : at(x + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4)) {}
  // The lane's chunk in half of the atom's columns of a tile of 8 rows.
  __device__ __forceinline__ uint32_t chunk(int tile, int half) const {
    return (at ^ 64 * half) + tile * 8 * 128;
  }
  __device__ __forceinline__ void next_atom() { at += kXAtomBytes; }
};

// The fp32 accumulators of one thread, lane 4g + t of warp w: tile[2i] belongs to row g of row
// block 2w, tile[2i + 1] to row g of row block 2w + 1; x and y are rows 8i + 2t and 8i + 2t + 1 of
// X. With WIDE, W and X change roles. A product waits for the one before it that adds to the same
// accumulators; for few rows of X there are several sets, which products use round-robin.
struct Accumulators {
  static constexpr int kSets = SETS;

  float2 tile[kSets][2 * TILES] = {};

  __device__ __forceinline__ float2 total(int number) const {
    float2 all = tile[0][number];
#pragma unroll
    for (int set = 1; set < kSets; set++)
      all.x += tile[set][number].x, all.y += tile[set][number].y;
    return all;
  }
};

// Lanes exchange accumulators, so that a pair is two neighbouring rows of W, which are neighbours in
// Y. Pair 2i + j of lane 4g + t is of row block j and tile i of X: of rows g / 2 * 2 and behind of
// the row block, and of row 2t + g % 2 of the tile.
__device__ __forceinline__ void exchange(const Accumulators& acc, float2 (&pairs)[2 * TILES]) {
  const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const float2 own = acc.total(i);
    const float other = __shfl_xor_sync(0xffffffff, odd ? own.x : own.y, 4);
    pairs[i] = odd ? float2{other, own.y} : float2{own.x, other};
  }
}
