// The softmax state of a warp, and where it is left.
#pragma once

#include "attention_operands.cuh"

// A warp's softmax and weighted values over the positions that it has seen. Lane 4g + t has query
// heads 2t and 2t + 1 of each tile: of the sums of weights its own rows' part, and of the outputs
// dimensions 16 s + g (low) and + 8 (high).
struct State {
  float2 most[GROUP_TILES], sum[GROUP_TILES];
  float2 low[GROUP_TILES][kSteps], high[GROUP_TILES][kSteps];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      most[tile] = {kNone, kNone};
      sum[tile] = {0.0f, 0.0f};
#pragma unroll
      for (int s = 0; s < kSteps; s++)
        low[tile][s] = high[tile][s] = {0.0f, 0.0f};
    }
  }
};

// The largest, or the sum, over the lanes that have the same heads: those of equal t.
__device__ __forceinline__ float over_rows(float value, bool largest) {
#pragma unroll
  for (int far = 4; far < 32; far *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, value, far);
    value = largest ? fmaxf(value, other) : value + other;
  }
  return value;
}

// A KV head of a slot, and where what is left of it lies.
struct Row {
  const SplitKFlashAttnArgs& args;
  const int number;  // its slot times the KV heads, plus itself
  const int units;
  const int size;  // of what a warp leaves: [group][kPart]

  __device__ __forceinline__ Row(const SplitKFlashAttnArgs& args, const Held& held)
      : args(args), number(held.row), units(held.units), size(ptx::anew(args.group) * kPart) {}

  __device__ __forceinline__ Element* outputs(int head) const {
    return args.out + (static_cast<int64_t>(number) * args.group + head) * HEAD_DIM;
  }
  // A unit's own sums have the place of its first part.
  __device__ __forceinline__ float* part(int unit, int part) const {
    const int64_t units = static_cast<int64_t>(number) * args.max_units + unit;
    return args.partials + (units * args.max_parts + part) * size;
  }
  // How many units of a head are there, or how many parts of a unit.
  __device__ __forceinline__ int* units_of_head(int head) const {
    return args.arrivals + static_cast<int64_t>(number) * (args.group + args.max_units) + head;
  }
  __device__ __forceinline__ int* parts_of_unit(int unit) const {
    return units_of_head(args.group + unit);
  }
};

// A warp's state over a whole KV head.
__device__ __forceinline__ void store(const Row& row, const State& state) {
  const int lane = lane_anew(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    const float2 sums = {over_rows(state.sum[tile].x, false), over_rows(state.sum[tile].y, false)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * tile + 2 * t + i;
      if (head >= row.args.group) continue;
      const float scale = 1.0f / (i ? sums.y : sums.x);
      Element* const out = row.outputs(head);
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const float2 low = state.low[tile][s], high = state.high[tile][s];
        convert(out[16 * s + g], scale * (i ? low.y : low.x));
        convert(out[16 * s + g + 8], scale * (i ? high.y : high.x));
      }
    }
  }
}

// A warp's state over a part, as [group][kPart].
__device__ __forceinline__ void leave(const State& state, int group, float* to) {
  const int lane = lane_anew(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    const float2 sums = {over_rows(state.sum[tile].x, false), over_rows(state.sum[tile].y, false)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * tile + 2 * t + i;
      if (head >= group) continue;
      float* const of_head = to + head * kPart;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const float2 low = state.low[tile][s], high = state.high[tile][s];
        of_head[16 * s + g] = i ? low.y : low.x;
        of_head[16 * s + g + 8] = i ? high.y : high.x;
      }
      if (g > 0) continue;
      of_head[HEAD_DIM] = i ? state.most[tile].y : state.most[tile].x;
      of_head[HEAD_DIM + 1] = i ? sums.y : sums.x;
    }
  }
}
