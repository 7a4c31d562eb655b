// Rows of a warpgroup's part of a tile, and their online softmax.
#pragma once

#include "prompt_multiply.cuh"
#include "rope.cuh"

// Part of a tile: up to kPartRows rows, row r = (query r / group, query head r % group of the KV
// head). A thread has two of them, kept as numbers 0 and 1.
struct Part {
  int first_query, rows;  // within the tile; rows past them repeat the last
  int blocks;             // that its queries see, of the tile's
  int row[2];             // of the thread
  int query[2], head[2];  // of these rows

  __device__ __forceinline__ Part(const PromptAttnArgs& args, const PromptTile& tile, int part) {
    first_query = part * args.part_queries;
    const int queries = min(args.part_queries, tile.queries - first_query);
    rows = max(0, queries * args.group);
    const int last = tile.position + first_query + queries - 1;
    blocks = rows > 0 ? max(0, min(tile.blocks, last / kBlock + 1 - tile.first_block)) : 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row[i] = 16 * warp + lane / 4 + 8 * i;
      const int within = max(0, min(row[i], rows - 1));
      query[i] = first_query + within / args.group;
      head[i] = within % args.group;
    }
  }
  // Offset of a thread's row in [T][kv_heads * group][HEAD_DIM], with `stride` from token to token.
  __device__ __forceinline__ int64_t offset(const PromptAttnArgs& args, const WorkItems& items,
                                            int i, int64_t stride) const {
    const int64_t token = items.tile.row + query[i];
    return token * stride + (static_cast<int64_t>(items.head) * args.group + head[i]) * HEAD_DIM;
  }
};

// Rotate a thread's row `i` of the queries to a position.
__device__ __forceinline__ void rotate_queries(const float2* rotations, int i, Queries& queries) {
#pragma unroll
  for (int vector = 0; vector < kVectors / 2; vector++) {
    const int dim = 8 * vector + threadIdx.x % 4 * 2, partner = vector + kVectors / 2;
    uint32_t& low = queries.step[vector / 2][vector % 2 * 2 + i];
    uint32_t& high = queries.step[partner / 2][partner % 2 * 2 + i];
    float2 first = unpacked(low), second = unpacked(high);
    rotate(rotations, dim, first.x, second.x);
    rotate(rotations, dim + 1, first.y, second.y);
    low = packed(first.x, first.y), high = packed(second.x, second.y);
  }
}

__device__ __forceinline__ void load_queries(const PromptAttnArgs& args, const WorkItems& items,
                                             const Part& part, Queries& queries) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Element* const q =
        args.q + part.offset(args, items, i, args.stride) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int vector = 0; vector < kVectors; vector++)
      queries.step[vector / 2][vector % 2 * 2 + i] =
          *reinterpret_cast<const uint32_t*>(q + 8 * vector);
    if (kPrefixes && args.rotations) {
      const int position = max(0, args.lengths[items.tile.row + part.query[i]]);
      rotate_queries(args.rotations + static_cast<int64_t>(position) * (HEAD_DIM / 2), i, queries);
    }
  }
}

// Online softmax state of a thread's two rows, and their unnormalized outputs. row_max, in units of
// exp2, is of all positions so far; row_sum only of those that the thread holds.
struct Accumulators {
  float row_max[2], row_sum[2];
  float2 outputs[kOutputs];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < 2; i++)
      row_max[i] = kMaskedScore, row_sum[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOutputs; i++)
      outputs[i] = {0.0f, 0.0f};
  }
  __device__ __forceinline__ void rescale(const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < kStored; i++)
      outputs[i].x *= factors[i % 2], outputs[i].y *= factors[i % 2];
  }
  // Sum row_sum over the threads that share the rows.
  __device__ __forceinline__ void complete() {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row_sum[i] += __shfl_xor_sync(0xffffffff, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffff, row_sum[i], 2);
    }
  }
};

// Mask scores of the block's positions past `last`, of each of the thread's rows.
__device__ __forceinline__ void mask(const int (&last)[2], float2 (&scores)[kScores]) {
  const int position = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; i++) {
    const int at = i / 2 * 8 + position;
    if (at > last[i % 2]) scores[i].x = kMaskedScore;
    if (at + 1 > last[i % 2]) scores[i].y = kMaskedScore;
  }
}

// Turn scores into unnormalized probabilities exp2(score * scale - row_max), with a new row_max.
// Out: the factors that rescale the outputs to it.
__device__ __forceinline__ void softmax(float scale, float2 (&scores)[kScores], Accumulators& acc,
                                        float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float largest = kMaskedScore;
#pragma unroll
    for (int j = i; j < kScores; j += 2)
      largest = fmaxf(largest, fmaxf(scores[j].x, scores[j].y));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    // A row that has seen no position keeps kMaskedScore; its probabilities are all 0.
    const float row_max =
        largest == kMaskedScore ? acc.row_max[i] : fmaxf(acc.row_max[i], largest * scale);
    const float base = row_max == kMaskedScore ? 0.0f : row_max;
    factors[i] = ptx::exp2(acc.row_max[i] - base);
    float row_sum = acc.row_sum[i] * factors[i];
#pragma unroll
    for (int j = i; j < kScores; j += 2) {
      scores[j] = {ptx::exp2(scores[j].x * scale - base), ptx::exp2(scores[j].y * scale - base)};
      row_sum += scores[j].x + scores[j].y;
    }
    acc.row_max[i] = row_max, acc.row_sum[i] = row_sum;
  }
}

__device__ __forceinline__ void pack(const float2 (&scores)[kScores], Probabilities& to) {
#pragma unroll
  for (int i = 0; i < kScores; i++)
    to.step[i / 4][i % 4] = packed(scores[i].x, scores[i].y);
}
