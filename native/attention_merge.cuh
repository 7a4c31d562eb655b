// The softmax state of a warp, and how those of an item's warps and of a head's chunks come
// together.
#pragma once

#include "splitk_flash_attn.cuh"

// A warp's softmax and weighted values over the positions that it has seen. Lane 4g + t has query
// heads 2t and 2t + 1 of each tile: of the sums of weights its own rows' part, and of the outputs
// dimensions 16 s + g (low) and + 8 (high).
struct State {
  float2 most[GROUP_TILES], sum[GROUP_TILES];
  float2 low[GROUP_TILES][kSteps] = {}, high[GROUP_TILES][kSteps] = {};

  __device__ __forceinline__ State() {
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      most[tile] = {kNone, kNone};
      sum[tile] = {0.0f, 0.0f};
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

// Brings the warps' states of an item together, some heads at a time, and stores what comes of it.
struct Merge {
  float* const values;   // [warps][kMergeHeads][HEAD_DIM] in shared memory
  float2* const totals;  // [warps][kMergeHeads]: largest score, sum of weights
  int* const last;       // whether the item is the last of its head to be done

  __device__ __forceinline__ explicit Merge(uint8_t* memory)
      : values(reinterpret_cast<float*>(memory)),
        totals(reinterpret_cast<float2*>(values + kWarps * kMergeHeads * HEAD_DIM)),
        last(reinterpret_cast<int*>(totals + kWarps * kMergeHeads)) {}

  __device__ __forceinline__ void finish(const SplitKFlashAttnArgs& args, const Items& items,
                                         const State& state) const {
    const int row = items.slot * args.kv_heads + items.head, chunks = items.chunk_count();
    const int64_t size = static_cast<int64_t>(args.group) * (HEAD_DIM + 2);
    float* const partials = args.partials + row * args.max_chunks * size;
    for (int first = 0; first < args.group; first += kMergeHeads) {
      const int heads = min(kMergeHeads, args.group - first);
      publish(first, heads, state);
      ptx::named_barrier_sync(1, kConsumers);
      for (int i = threadIdx.x; i < heads * HEAD_DIM; i += kConsumers) {
        const int head = i / HEAD_DIM, dim = i % HEAD_DIM;
        float most = kNone, sum = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; w++)
          most = fmaxf(most, totals[w * kMergeHeads + head].x);
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
          const float2 total = totals[w * kMergeHeads + head];
          const float weight = exp2f(total.x - most);
          sum += weight * total.y;
          value += weight * values[(w * kMergeHeads + head) * HEAD_DIM + dim];
        }
        if (chunks == 1) {
          store(args, row, first * HEAD_DIM + i, value / sum);
        } else {
          float* const to = partials + items.chunk * size + (first + head) * (HEAD_DIM + 2);
          to[dim] = value;
          if (dim == 0) to[HEAD_DIM] = most, to[HEAD_DIM + 1] = sum;
        }
      }
      ptx::named_barrier_sync(1, kConsumers);  // the scratch memory is free again
    }
    if (chunks > 1) combine(args, row, chunks, partials, size);
  }

 private:
  // A warp all of whose positions lie behind the end has seen nothing: its weight comes to zero.
  __device__ __forceinline__ void publish(int first, int heads, const State& state) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      const float2 sums = {over_rows(state.sum[tile].x, false),
                           over_rows(state.sum[tile].y, false)};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int head = 8 * tile + 2 * t + i - first;
        if (head < 0 || head >= heads) continue;
        const int number = warp * kMergeHeads + head;
        if (g == 0) {
          totals[number] = {i ? state.most[tile].y : state.most[tile].x, i ? sums.y : sums.x};
        }
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          float* const at = values + number * HEAD_DIM + 16 * s + g;
          at[0] = i ? state.low[tile][s].y : state.low[tile][s].x;
          at[8] = i ? state.high[tile][s].y : state.high[tile][s].x;
        }
      }
    }
  }

  // Output `i` of a KV head's group, all of them of `row`: slot times KV heads plus the KV head.
  __device__ __forceinline__ static void store(const SplitKFlashAttnArgs& args, int row, int i,
                                               float value) {
    convert(args.out[static_cast<int64_t>(row) * args.group * HEAD_DIM + i], value);
  }

  // Whoever is the last to have written a chunk's part adds up all of them, in order.
  __device__ __forceinline__ void combine(const SplitKFlashAttnArgs& args, int row, int chunks,
                                          const float* partials, int64_t size) const {
    __threadfence();  // the part before the arrival, at the scope of the GPU
    ptx::named_barrier_sync(1, kConsumers);
    if (threadIdx.x == 0) {
      *last = atomicAdd(args.arrivals + row, 1) == chunks - 1;
      if (*last) args.arrivals[row] = 0;
      __threadfence();  // the arrival before the other parts
    }
    ptx::named_barrier_sync(1, kConsumers);
    if (!*last) return;
    for (int i = threadIdx.x; i < args.group * HEAD_DIM; i += kConsumers) {
      const float* const head = partials + i / HEAD_DIM * (HEAD_DIM + 2);
      float most = kNone, sum = 0.0f, value = 0.0f;
      for (int chunk = 0; chunk < chunks; chunk++) {
        const volatile float* const part = head + chunk * size;
        const float now = fmaxf(most, part[HEAD_DIM]);
        const float kept = exp2f(most - now), weight = exp2f(part[HEAD_DIM] - now);
        sum = sum * kept + part[HEAD_DIM + 1] * weight;
        value = value * kept + part[i % HEAD_DIM] * weight;
        most = now;
      }
      store(args, row, i, value / sum);
    }
  }
};
