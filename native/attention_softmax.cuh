// Attention of one KV block: S = K Q^T, online softmax, O^T += V^T P^T.
#pragma once

#include "attention_operands.cuh"
#include "attention_state.cuh"

// Scores of a block's keys. Lane 4g + t has query heads 2t (x) and 2t + 1 (y), and of tile i the
// positions 16 i + g (top) and 16 i + g + 8 (bottom).
struct Scores {
  float2 top[kTiles][GROUP_TILES] = {}, bottom[kTiles][GROUP_TILES] = {};
};

// Addresses of a lane's row for ldmatrix: one position in every tile, and the first or second 8
// (`half`) of every 16 dimensions.
struct MatrixRow {
  const uint32_t first;
  const int swizzle;

  __device__ __forceinline__ MatrixRow(uint32_t stage, int row, int half)
      : first(stage + row * kRowBytes), swizzle(half ^ swizzle_of(row)) {}

  __device__ __forceinline__ uint32_t of(int tile, int step) const {
    const int vector = 2 * step / kSwizzle * kSwizzle, within = 2 * step % kSwizzle;
    return first + (within ^ swizzle) * 16 + tile * kTileRows * kRowBytes + vector * 16;
  }
};

// S = K Q^T.
__device__ __forceinline__ void multiply_keys(uint32_t keys, const Queries& queries,
                                              Scores& scores) {
  // ldmatrix rows by lane: 16 positions, then the same with the next 8 dimensions.
  const int lane = opaque_lane();
  const MatrixRow row(keys, lane % 16, lane / 16);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, row.of(i, s));
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; tile++) {
        ptx::mma(scores.top[i][tile], scores.bottom[i][tile], a, queries.step[tile][s][0],
                 queries.step[tile][s][1], Element());
      }
    }
  }
}

// Unnormalized probabilities exp2(score - row_max) as B operand. The constructor masks the scores
// of positions from `valid` on, and rescales the accumulators to the new row_max.
struct Probabilities {
  uint32_t fragment[kTiles][GROUP_TILES][2];

  __device__ __forceinline__ Probabilities(Scores& scores, int valid, float scale,
                                           Accumulators& acc) {
    const int row = opaque_lane() / 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      float2 row_max = acc.row_max[tile];
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        float2 &top = scores.top[i][tile], &bottom = scores.bottom[i][tile];
        const int at = kTileRows * i + row;
        top =
            at < valid ? float2{top.x * scale, top.y * scale} : float2{kMaskedScore, kMaskedScore};
        bottom = at + 8 < valid ? float2{bottom.x * scale, bottom.y * scale}
                                : float2{kMaskedScore, kMaskedScore};
        row_max = {fmaxf(row_max.x, fmaxf(top.x, bottom.x)),
                   fmaxf(row_max.y, fmaxf(top.y, bottom.y))};
      }
      row_max = {reduce_rows(row_max.x, true), reduce_rows(row_max.y, true)};
      const float2 rescale = {ptx::exp2(acc.row_max[tile].x - row_max.x),
                              ptx::exp2(acc.row_max[tile].y - row_max.y)};
      float2 row_sum = {acc.row_sum[tile].x * rescale.x, acc.row_sum[tile].y * rescale.y};
      acc.row_max[tile] = row_max;
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const float2 top = scores.top[i][tile], bottom = scores.bottom[i][tile];
        const float2 p_top = {ptx::exp2(top.x - row_max.x), ptx::exp2(top.y - row_max.y)};
        const float2 p_bottom = {ptx::exp2(bottom.x - row_max.x), ptx::exp2(bottom.y - row_max.y)};
        row_sum = {row_sum.x + p_top.x + p_bottom.x, row_sum.y + p_top.y + p_bottom.y};
        fragment[i][tile][0] = ptx::movmatrix_trans(packed(p_top.x, p_top.y));
        fragment[i][tile][1] = ptx::movmatrix_trans(packed(p_bottom.x, p_bottom.y));
      }
      acc.row_sum[tile] = row_sum;
      // Most blocks leave row_max as it is.
      if (!__ballot_sync(0xffffffff, rescale.x != 1.0f || rescale.y != 1.0f)) continue;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        float2 &first = acc.top[tile][s], &second = acc.bottom[tile][s];
        first = {first.x * rescale.x, first.y * rescale.y};
        second = {second.x * rescale.x, second.y * rescale.y};
      }
    }
  }
};

// O^T += V^T P^T. Skips tiles that lie wholly past the first `valid` positions.
__device__ __forceinline__ void multiply_values(uint32_t values, int valid,
                                                const Probabilities& probabilities,
                                                Accumulators& acc) {
  // ldmatrix rows by lane: 8 positions of the first 8 dimensions, of the next 8, then 8 more
  // positions.
  const int lane = opaque_lane();
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
        ptx::mma(acc.top[tile][s], acc.bottom[tile][s], a, probabilities.fragment[i][tile][0],
                 probabilities.fragment[i][tile][1], Element());
      }
    }
  }
}
