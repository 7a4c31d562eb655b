// The softmax state of a warp, and how those of a head's chunks come together.
#pragma once

#include "splitk_flash_attn.cuh"

// A block of an item and where it lies: what the copying warp tells the one that attends.
struct Task {
  int slot, head, chunk;  // of the item; no slot: there is nothing more
  int number, count;      // of the block, of the item's
  int k_stage, v_stage;
};

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

// Of a head's chunks, the parts that warps leave: [chunks][group][HEAD_DIM + 2], the values, the
// largest score and the sum of weights.
struct Parts {
  const SplitKFlashAttnArgs& args;
  const int row;  // slot times KV heads plus the KV head
  const int64_t size;
  float* const first;

  __device__ __forceinline__ Parts(const SplitKFlashAttnArgs& args, int row)
      : args(args),
        row(row),
        size(static_cast<int64_t>(args.group) * (HEAD_DIM + 2)),
        first(args.partials + row * args.max_chunks * size) {}

  // Output `i` of the KV head's group.
  __device__ __forceinline__ void store(int i, float value) const {
    convert(args.out[static_cast<int64_t>(row) * args.group * HEAD_DIM + i], value);
  }

  // Whoever is the last to have left a part adds up all of them, in order.
  __device__ __forceinline__ void combine(int chunks) const {
    const int lane = threadIdx.x % 32;
    __threadfence();  // the part before the arrival, at the scope of the GPU
    __syncwarp();
    int before = 0;
    if (lane == 0) before = atomicAdd(args.arrivals + row, 1);
    if (__shfl_sync(0xffffffff, before, 0) != chunks - 1) return;
    if (lane == 0) args.arrivals[row] = 0;
    __threadfence();  // the arrival before the other parts
    for (int i = lane; i < args.group * HEAD_DIM; i += 32) {
      const float* const head = first + i / HEAD_DIM * (HEAD_DIM + 2);
      float most = kNone, sum = 0.0f, value = 0.0f;
#pragma unroll 4
      for (int chunk = 0; chunk < chunks; chunk++) {
        const volatile float* const part = head + chunk * size;
        const float now = fmaxf(most, part[HEAD_DIM]);
        const float kept = exp2f(most - now), weight = exp2f(part[HEAD_DIM] - now);
        sum = sum * kept + part[HEAD_DIM + 1] * weight;
        value = value * kept + part[i % HEAD_DIM] * weight;
        most = now;
      }
      store(i, value / sum);
    }
  }
};

// Stores what comes of an item: outputs, or its head's part.
__device__ __forceinline__ void finish(const SplitKFlashAttnArgs& args, const Task& task,
                                       const State& state) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int blocks = blocks_of(args, task.slot);
  const int chunks = (blocks + args.chunk_blocks - 1) / args.chunk_blocks;
  const Parts parts(args, task.slot * args.kv_heads + task.head);
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    const float2 sums = {over_rows(state.sum[tile].x, false), over_rows(state.sum[tile].y, false)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * tile + 2 * t + i;
      if (head >= args.group) continue;
      const float sum = i ? sums.y : sums.x;
      if (chunks == 1) {
        const float scale = 1.0f / sum;
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          const float2 low = state.low[tile][s], high = state.high[tile][s];
          parts.store(head * HEAD_DIM + 16 * s + g, scale * (i ? low.y : low.x));
          parts.store(head * HEAD_DIM + 16 * s + g + 8, scale * (i ? high.y : high.x));
        }
        continue;
      }
      float* const part = parts.first + task.chunk * parts.size + head * (HEAD_DIM + 2);
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        part[16 * s + g] = i ? state.low[tile][s].y : state.low[tile][s].x;
        part[16 * s + g + 8] = i ? state.high[tile][s].y : state.high[tile][s].x;
      }
      if (g == 0) {
        part[HEAD_DIM] = i ? state.most[tile].y : state.most[tile].x;
        part[HEAD_DIM + 1] = sum;
      }
    }
  }
  if (chunks > 1) parts.combine(chunks);
}
