// Products with a W of 4 or 8 bits for few rows of X, by mma: the warps of a team divide K in shares,
// and then add their sums, (0 + 1) + (2 + 3), and with 8 shares ... + ((4 + 5) + (6 + 7)). With 4
// shares each warpgroup is a team and has half of a group's row blocks. With 8 shares all warps are
// one team; such a group has at most kTileRowBlocks row blocks. In grouped_splitk.cu a K of one unit
// is not divided: each warp has row blocks to itself.
//
// Expanding a weight costs more than multiplying it by few rows of X, so no weight is expanded twice
// and no warp is idle, however few row blocks a group has. Zeros are subtracted as 16-bit floats,
// exactly, and scales are applied to the sums in float32. The file that includes this one defines, by
// the registers that it leaves: whether they are few (kFewRegisters), the row blocks multiplied at
// once (kAtOnce), and how many atoms of a unit the loop unrolls (kUnrolledAtoms: the loads of the
// second go beside the products of the first).
#pragma once

#include "units.cuh"

constexpr int kShares = kWarpgroup / 32;        // of K, at least
constexpr int kWarpPairs = kTileRowBlocks / 2;  // pairs of row blocks of a warp, at most
static_assert(kWarpPairs == kShares, "a warp stores the outputs of one pair");
// A product waits for the one before it with the same sums: with one tile of X there are two sets.
constexpr int kSets = TILES == 1 && GROUP >= 64 ? 2 : 1;
// With more rows of X, or a scale for each product, scaling the weights takes less than scaling sums,
// and no registers. Factors of scales are applied with a warp's last unit. e2m1 times e4m3 is exact
// in 16 bits.
constexpr bool kScalesWeights = SCALE_BYTES == 1 || (TILES > 1 && SCALE_BYTES < 4);
// Of codes, at once; fewer take fewer registers, but shared memory serves them in more parts.
constexpr int kLoadedSteps = kFewRegisters && kCodeBits == 8 ? 2 / TILES
                             : kFewRegisters || TILES == 1 ? 4
                                                           : kWordSteps;
constexpr int kExchangeBarrier = 1;  // and 2: where a warpgroup exchanges sums

using Sums = float2[2 * TILES];  // of a pair of row blocks, as in Accumulators

// acc += W X^T for a unit of each of `row_blocks` row blocks, the warp's last or not, and 128 columns
// of X from shared address `x` on. Several pairs at once hide each other's latencies.
template <int row_blocks, typename X>
__device__ __forceinline__ void multiply(const uint8_t* w, uint32_t x_address, bool last,
                                         Sums* acc) {
  constexpr int kPairs = (row_blocks + 1) / 2;
  constexpr bool kWhole = GROUP > kAtomK;  // one scale for the unit
  const int lane = opaque_lane();
  X x(x_address, lane);
  float2 sums[kPairs][kSets][2 * TILES] = {};
  RowScales scales[row_blocks];
  // acc += scales * sums
  const auto add = [&](int step) {
#pragma unroll
    for (int i = 0; i < row_blocks; i++) {
      const float scale = scales[i].scale(step);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const int number = 2 * tile + i % 2;
        float2 sum = sums[i / 2][0][number];
        if (kSets == 2) {
          const float2 more = sums[i / 2][kSets - 1][number];
          sum.x += more.x, sum.y += more.y;
        }
        acc[i / 2][number].x += scale * sum.x, acc[i / 2][number].y += scale * sum.y;
      }
    }
  };
#pragma unroll kUnrolledAtoms
  for (int atom = 0; atom < kUnitAtoms; atom++, x.next_atom()) {
    Codes<kLoadedSteps> codes[row_blocks];
#pragma unroll
    for (int i = 0; i < row_blocks; i++)
      scales[i].load(w + i * kUnitBytes, atom, lane / 4);
    uint32_t b[TILES][4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const int set = step % kSets, in_group = step * 16 % GROUP;
#pragma unroll
      for (int i = 0; i < row_blocks && step % kLoadedSteps == 0; i++)
        codes[i].load(w + i * kUnitBytes, atom, step, lane);
      if (step % 2 == 0) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
          ptx::ldmatrix_x4(b[tile], x.chunk(tile, step / 2));
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; pair++) {
        const int top = 2 * pair, bottom = top + 1;
        uint32_t of_top[2], of_bottom[2] = {};
        if (SCALE_BYTES == 1) {  // a scale has the power of two too
          codes[top].place(step, of_top);
          if (bottom < row_blocks) codes[bottom].place(step, of_bottom);
        } else {
          codes[top].expand(step, scales[top], of_top);
          if (bottom < row_blocks) codes[bottom].expand(step, scales[bottom], of_bottom);
        }
#pragma unroll
        for (int i = 0; i < 2 && kScalesWeights; i++) {
          of_top[i] = ptx::mul(of_top[i], scales[top].scale_pair(step), Element());
          if (bottom < row_blocks)
            of_bottom[i] = ptx::mul(of_bottom[i], scales[bottom].scale_pair(step), Element());
        }
        const uint32_t a[4] = {of_top[0], of_bottom[0], of_top[1], of_bottom[1]};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          float2* const of = (kScalesWeights ? acc[pair] : sums[pair][set]) + 2 * tile;
          if (!kScalesWeights && !kWhole && in_group < kSets * 16) of[0] = of[1] = {0.0f, 0.0f};
          ptx::mma(of[0], of[1], a, b[tile][step % 2 * 2], b[tile][step % 2 * 2 + 1], Element());
        }
      }
      if (!kScalesWeights && !kWhole && (step + 1) * 16 % GROUP == 0) add(step);
    }
  }
  if (!kScalesWeights && kWhole) add(0);
  if (kScalesWeights && SCALE_BYTES == 1 && last) {
#pragma unroll
    for (int i = 0; i < row_blocks; i++) {
      const float factor = factor_of(w + i * kUnitBytes, lane / 4) * (1 << kBias - kScaleBias);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float2& sum = acc[i / 2][2 * tile + i % 2];
        sum.x *= factor, sum.y *= factor;
      }
    }
  }
}

// The same for up to `most` row blocks, of which there are `count`.
template <int most, typename X = SwizzledX>
__device__ __forceinline__ void multiply_some(int count, const uint8_t* w, uint32_t x, bool last,
                                              Sums* acc) {
  if (count >= most) {
    multiply<most, X>(w, x, last, acc);
  } else if constexpr (most > 1) {
    multiply_some<most - 1, X>(count, w, x, last, acc);
  }
}

// The warp's team, its share of K, and its team's row blocks of a group. Opaque: computed anew where
// they are used, they occupy no registers during the products.
__device__ __forceinline__ int own_team(int shares) {
  return shares > kShares ? 0 : ptx::opaque<uint32_t>(threadIdx.x) / kWarpgroup;
}
__device__ __forceinline__ int own_share(int shares) {
  return ptx::opaque<uint32_t>(threadIdx.x) / 32 & shares - 1;
}
__device__ __forceinline__ void divide(int shares, int row_blocks, int& first, int& count) {
  const int most = shares > kShares ? row_blocks : (row_blocks + 1) / 2;
  first = own_team(shares) * most;
  count = min(most, row_blocks - first);
}

constexpr int kPart = 32 * TILES;  // float4s of a warp's sums for a pair

// The sum of four warps' parts.
__device__ __forceinline__ float4 sum_of(const float4* parts) {
  float4 of[kShares];
#pragma unroll
  for (int from = 0; from < kShares; from++)
    of[from] = parts[from * 2 * kPart];
#pragma unroll
  for (int distance = 1; distance < kShares; distance *= 2) {
#pragma unroll
    for (int to = 0; to < kShares; to += 2 * distance) {
      const float4 more = of[to + distance];
      of[to].x += more.x, of[to].y += more.y, of[to].z += more.z, of[to].w += more.w;
    }
  }
  return of[0];
}

// The sums of a team's warps for pair `share` of their `count`, two pairs at a time; sums[i] are the
// warp's own for pair i.
__device__ __forceinline__ void reduce(const Sums (&sums)[kWarpPairs], int shares, int share,
                                       int count, Sums& total) {
  const int barrier = kExchangeBarrier + own_team(shares), threads = 32 * shares;
  float4* const parts = reinterpret_cast<float4*>(smem) + own_team(shares) * 2 * kShares * kPart +
                        threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kWarpPairs; first += 2) {
    if (first >= count) break;
    // The parts before have been read.
    ptx::named_barrier_sync(barrier, threads);
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      const Sums& of = sums[first + i / TILES];
      const float2 top = of[i % TILES * 2], bottom = of[i % TILES * 2 + 1];
      parts[share * 2 * kPart + 32 * i] = {top.x, top.y, bottom.x, bottom.y};
    }
    ptx::named_barrier_sync(barrier, threads);
    if (share / 2 != first / 2) continue;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float4* const of_pair = parts + share % 2 * kPart + 32 * i;
      float4 sum = sum_of(of_pair);
      if (shares > kShares) {
        const float4 more = sum_of(of_pair + kShares * 2 * kPart);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      total[2 * i] = {sum.x, sum.y}, total[2 * i + 1] = {sum.z, sum.w};
    }
  }
}
