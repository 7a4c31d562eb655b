// Accumulators of a warp, and where they are stored.
#pragma once

#include "attention_operands.cuh"

// Online softmax state and unnormalized outputs over the positions that a warp has seen. Lane 4g +
// t holds query heads 2t (x) and 2t + 1 (y) of each tile of 8: row_max over all positions, row_sum
// only over the positions whose scores the lane holds (see Scores), and outputs of dimensions
// 16 s + g (top) and 16 s + g + 8 (bottom).
struct Accumulators {
  float2 row_max[GROUP_TILES], row_sum[GROUP_TILES];
  float2 top[GROUP_TILES][kSteps], bottom[GROUP_TILES][kSteps];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      row_max[tile] = {kMaskedScore, kMaskedScore};
      row_sum[tile] = {0.0f, 0.0f};
#pragma unroll
      for (int s = 0; s < kSteps; s++)
        top[tile][s] = bottom[tile][s] = {0.0f, 0.0f};
    }
  }
  // Go on from a partial result [group][kPartial].
  __device__ __forceinline__ void load(const float* from, int group) {
    const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      const float* const x = from + min(8 * tile + 2 * t, group - 1) * kPartial;
      const float* const y = from + min(8 * tile + 2 * t + 1, group - 1) * kPartial;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        top[tile][s] = {ptx::load_from_l2(x + 16 * s + g), ptx::load_from_l2(y + 16 * s + g)};
        bottom[tile][s] = {ptx::load_from_l2(x + 16 * s + g + 8),
                           ptx::load_from_l2(y + 16 * s + g + 8)};
      }
      const float2 first = ptx::load_from_l2(reinterpret_cast<const float2*>(x + HEAD_DIM));
      const float2 second = ptx::load_from_l2(reinterpret_cast<const float2*>(y + HEAD_DIM));
      row_max[tile] = {first.x, second.x};
      row_sum[tile] = g == 0 ? float2{first.y, second.y} : float2{0.0f, 0.0f};
    }
  }
};

// Maximum or sum over the lanes with the same query heads, those of equal t.
__device__ __forceinline__ float reduce_rows(float value, bool maximum) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, value, distance);
    value = maximum ? fmaxf(value, other) : value + other;
  }
  return value;
}

// A KV head of a slot: its outputs, partial results and arrival counters.
struct KvHead {
  const SplitKFlashAttnArgs& args;
  const int number;  // slot * kv_heads + KV head
  const int splits;
  const int size;  // floats of a partial result [group][kPartial]

  __device__ __forceinline__ KvHead(const SplitKFlashAttnArgs& args, const ItemRecord& record)
      : args(args),
        number(record.kv_head),
        splits(record.splits),
        size(ptx::opaque(args.group) * kPartial) {}

  __device__ __forceinline__ Element* outputs(int head) const {
    return args.out + (static_cast<int64_t>(number) * args.group + head) * HEAD_DIM;
  }
  // Partial result of a chunk. That of a whole split takes the place of its first chunk.
  __device__ __forceinline__ float* partial(int split, int chunk) const {
    const int64_t index = static_cast<int64_t>(number) * args.max_splits + split;
    return args.partials + (index * args.max_chunks + chunk) * size;
  }
  // Counters of the splits of a query head, and of the chunks of a split, that have arrived.
  __device__ __forceinline__ int* split_arrivals(int head) const {
    return args.arrivals + static_cast<int64_t>(number) * (args.group + args.max_splits) + head;
  }
  __device__ __forceinline__ int* chunk_arrivals(int split) const {
    return split_arrivals(args.group + split);
  }
};

// Store the outputs of a whole KV head.
__device__ __forceinline__ void store(const KvHead& kv_head, const Accumulators& acc) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    const float2 row_sum = {reduce_rows(acc.row_sum[tile].x, false),
                            reduce_rows(acc.row_sum[tile].y, false)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * tile + 2 * t + i;
      if (head >= kv_head.args.group) continue;
      const float scale = 1.0f / (i ? row_sum.y : row_sum.x);
      Element* const out = kv_head.outputs(head);
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const float2 top = acc.top[tile][s], bottom = acc.bottom[tile][s];
        convert(out[16 * s + g], scale * (i ? top.y : top.x));
        convert(out[16 * s + g + 8], scale * (i ? bottom.y : bottom.x));
      }
    }
  }
}

// Store a partial result [group][kPartial]: unnormalized outputs, row_max, row_sum.
__device__ __forceinline__ void store_partial(const Accumulators& acc, int group, float* to) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    const float2 row_sum = {reduce_rows(acc.row_sum[tile].x, false),
                            reduce_rows(acc.row_sum[tile].y, false)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * tile + 2 * t + i;
      if (head >= group) continue;
      float* const of_head = to + head * kPartial;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const float2 top = acc.top[tile][s], bottom = acc.bottom[tile][s];
        of_head[16 * s + g] = i ? top.y : top.x;
        of_head[16 * s + g + 8] = i ? bottom.y : bottom.x;
      }
      if (g > 0) continue;
      of_head[HEAD_DIM] = i ? acc.row_max[tile].y : acc.row_max[tile].x;
      of_head[HEAD_DIM + 1] = i ? row_sum.y : row_sum.x;
    }
  }
}
