// What GEMMs over a packed W share: their warps, atoms of W and of X, and the sums of a thread.
#pragma once

#include "common.cuh"
#include "element.cuh"
#include "packed.cuh"

constexpr int kWarpgroups = WARPGROUPS;  // of consumers
constexpr int kWarpgroup = 128;
constexpr int kConsumers = kWarpgroups * kWarpgroup;
constexpr int kThreads = SPLITK_THREADS;  // and two warps that copy
static_assert(kThreads == kConsumers + 2 * 32, "two warps copy beside those that multiply");
constexpr int kAtomK = ATOM_COLS;

// One cubin per dtype and N: -DBFLOAT16 is 0 or 1, and a warpgroup multiplies 64 rows of W and
// 8 * X_TILES of X at a time, or, with -DWIDE=1, 64 rows of X and 8 * X_TILES of W.
#ifndef WIDE
#define WIDE 0
#endif
#ifndef SETS
#define SETS (X_TILES == 1 ? 4 : X_TILES == 2 ? 2 : 1)
#endif
constexpr int kXRows = kRowsPerBlock * (WIDE ? TILE_ROW_BLOCKS : X_TILES);
constexpr int kTileRowBlocks = WIDE ? X_TILES : TILE_ROW_BLOCKS;
constexpr int kXAtomBytes = kXRows * kAtomK * 2;

extern __shared__ __align__(1024) uint8_t smem[];

enum Activation : int { kNone = 0, kRelu = 1, kSiluMul = 2 };

__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Sums of one thread, lane 4g + t of warp w: for rows 8i to 8i + 7 of X, of rows 2t (x) and 2t + 1
// (y) of these with row g of row block 2w in tile[2i], and of row block 2w + 1 in tile[2i + 1];
// with WIDE the same with X and W exchanged. For few rows of X there are several sets of them,
// which products go to in turns: one that adds to what another one adds to waits for it.
struct Sums {
  static constexpr int kSets = SETS;

  float2 tile[kSets][2 * X_TILES] = {};

  __device__ __forceinline__ float2 total(int number) const {
    float2 all = tile[0][number];
#pragma unroll
    for (int set = 1; set < kSets; set++)
      all.x += tile[set][number].x, all.y += tile[set][number].y;
    return all;
  }
};
