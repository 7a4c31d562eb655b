// A block's share of the attention: scores of its keys, their softmax, weighted values.
#pragma once

#include "attention_operands.cuh"
#include "attention_state.cuh"

// Scores of a block's keys, of which the first `valid` count: of tile 16 i, + 8 in high.
struct Scores {
  float2 low[kTiles][GROUP_TILES] = {}, high[kTiles][GROUP_TILES] = {};
};

// Where a lane's rows for matrix loads lie: of the same position in every tile, of every 16
// dimensions the first or second 8.
struct MatrixRow {
  const uint32_t first;
  const int swizzle;

  __device__ __forceinline__ MatrixRow(uint32_t stage, int row, int half)
      : first(stage + row * kRowBytes), swizzle(half ^ swizzle_of(row)) {}

  __device__ __forceinline__ uint32_t of(int tile, int step) const {
    const int chunk = 2 * step / kSwizzle * kSwizzle, within = 2 * step % kSwizzle;
    return first + (within ^ swizzle) * 16 + tile * kTileRows * kRowBytes + chunk * 16;
  }
};

__device__ __forceinline__ void multiply_keys(uint32_t keys, const Queries& queries,
                                              Scores& scores) {
  // Lanes of ldmatrix go by position, then by the next 8 dimensions.
  const int lane = lane_anew();
  const MatrixRow row(keys, lane % 16, lane / 16);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, row.of(i, s));
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; tile++) {
        ptx::mma(scores.low[i][tile], scores.high[i][tile], a, queries.step[tile][s][0],
                 queries.step[tile][s][1], Element());
      }
    }
  }
}

// Probabilities as B operand, up to a factor, and the state brought to what they count by.
struct Weights {
  uint32_t pair[kTiles][GROUP_TILES][2];

  __device__ __forceinline__ Weights(Scores& scores, int valid, float scale, State& state) {
    const int row = lane_anew() / 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      float2 most = state.most[tile];
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        float2 &low = scores.low[i][tile], &high = scores.high[i][tile];
        const int at = kTileRows * i + row;
        low = at < valid ? float2{low.x * scale, low.y * scale} : float2{kNone, kNone};
        high = at + 8 < valid ? float2{high.x * scale, high.y * scale} : float2{kNone, kNone};
        most = {fmaxf(most.x, fmaxf(low.x, high.x)), fmaxf(most.y, fmaxf(low.y, high.y))};
      }
      most = {over_rows(most.x, true), over_rows(most.y, true)};
      const float2 kept = {ptx::exp2(state.most[tile].x - most.x),
                           ptx::exp2(state.most[tile].y - most.y)};
      float2 sum = {state.sum[tile].x * kept.x, state.sum[tile].y * kept.y};
      state.most[tile] = most;
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const float2 low = scores.low[i][tile], high = scores.high[i][tile];
        const float2 above = {ptx::exp2(low.x - most.x), ptx::exp2(low.y - most.y)};
        const float2 below = {ptx::exp2(high.x - most.x), ptx::exp2(high.y - most.y)};
        sum = {sum.x + above.x + below.x, sum.y + above.y + below.y};
        pair[i][tile][0] = ptx::movmatrix_trans(packed(above.x, above.y));
        pair[i][tile][1] = ptx::movmatrix_trans(packed(below.x, below.y));
      }
      state.sum[tile] = sum;
      // Mostly the largest score stays the largest.
      if (!__ballot_sync(0xffffffff, kept.x != 1.0f || kept.y != 1.0f)) continue;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        float2 &first = state.low[tile][s], &second = state.high[tile][s];
        first = {first.x * kept.x, first.y * kept.y};
        second = {second.x * kept.x, second.y * kept.y};
      }
    }
  }
};

// Values of tiles of positions that all lie behind the first `valid` are not read.
__device__ __forceinline__ void multiply_values(uint32_t values, int valid, const Weights& weights,
                                                State& state) {
  // Lanes of ldmatrix go by dimension, then by the next 8 positions.
  const int lane = lane_anew();
  const MatrixRow row(values, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    if (i * kTileRows >= valid) break;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, row.of(i, s));
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; tile++) {
        ptx::mma(state.low[tile][s], state.high[tile][s], a, weights.pair[i][tile][0],
                 weights.pair[i][tile][1], Element());
      }
    }
  }
}
