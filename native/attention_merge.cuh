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

// Of a KV head's chunks, the parts that warps leave: [chunks][group][kPart]. They come together in
// order, first those of kGroupChunks each, then what comes of these, by whichever warp is the last
// to have left one: what is added to what depends on the chunks alone.
struct Parts {
  const SplitKFlashAttnArgs& args;
  const int row, chunks;  // slot times KV heads plus the KV head
  const int64_t size;
  float* const first;
  int* const arrivals;

  __device__ __forceinline__ Parts(const SplitKFlashAttnArgs& args, int row, int chunks)
      : args(args),
        row(row),
        chunks(chunks),
        size(static_cast<int64_t>(args.group) * kPart),
        first(args.partials + row * args.max_chunks * size),
        arrivals(args.arrivals + row * (1 + groups_of(args.max_chunks))) {}

  // Output `i` of the KV head's group.
  __device__ __forceinline__ void store(int i, float value) const {
    convert(args.out[static_cast<int64_t>(row) * args.group * HEAD_DIM + i], value);
  }

  // Once the part of `chunk` is there.
  __device__ __forceinline__ void combine(int chunk) const {
    const int group = chunk / kGroupChunks, groups = groups_of(chunks);
    const int before = group * kGroupChunks, count = min(kGroupChunks, chunks - before);
    if (!last_of(arrivals + 1 + group, count)) return;
    add(first + before * size, size, count, groups == 1);
    if (groups == 1 || !last_of(arrivals, groups)) return;
    add(first, kGroupChunks * size, groups, true);
  }

 private:
  __device__ __forceinline__ static int groups_of(int chunks) {
    return (chunks + kGroupChunks - 1) / kGroupChunks;
  }

  // Whether the warp is the last of so many to come here.
  __device__ __forceinline__ static bool last_of(int* arrivals, int count) {
    __threadfence();  // its part before its arrival, at the scope of the GPU
    __syncwarp();
    const int lane = threadIdx.x % 32;
    int before = 0;
    if (lane == 0) {
      before = atomicAdd(arrivals, 1);
      if (before == count - 1) *arrivals = 0;
    }
    __threadfence();  // the arrival before the others' parts
    return __shfl_sync(0xffffffff, before, 0) == count - 1;
  }

  // Adds up `count` parts, at most 32, `stride` apart, into outputs or else into the first of them.
  __device__ __forceinline__ void add(float* parts, int64_t stride, int count, bool whole) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int head = 0; head < args.group; head++, parts += kPart) {
      float4 total = {kNone, 0.0f, 0.0f, 0.0f};
      if (lane < count) {
        total = ptx::load_from_l2(reinterpret_cast<float4*>(parts + lane * stride + HEAD_DIM));
      }
      float most = total.x;
#pragma unroll
      for (int far = 1; far < 32; far *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, far));
      const float weight = exp2f(total.x - most);
      float sum = total.y * weight;
#pragma unroll
      for (int far = 1; far < 32; far *= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, far);
      const float scale = whole ? weight / sum : weight;
      float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
      const int dim = min(4 * lane, HEAD_DIM - 4);
#pragma unroll 8
      for (int i = 0; i < count; i++) {
        const float by = __shfl_sync(0xffffffff, scale, i);
        const float4 more = ptx::load_from_l2(reinterpret_cast<float4*>(parts + i * stride + dim));
        value.x += by * more.x, value.y += by * more.y;
        value.z += by * more.z, value.w += by * more.w;
      }
      __syncwarp();
      if (4 * lane >= HEAD_DIM) continue;
      if (whole) {
        const int at = head * HEAD_DIM + dim;
        store(at, value.x), store(at + 1, value.y), store(at + 2, value.z), store(at + 3, value.w);
        continue;
      }
      *reinterpret_cast<float4*>(parts + dim) = value;
      if (lane == 0) *reinterpret_cast<float4*>(parts + HEAD_DIM) = {most, sum, 0.0f, 0.0f};
    }
  }
};

// Stores what comes of an item: outputs, or its part.
__device__ __forceinline__ void finish(const SplitKFlashAttnArgs& args, const Task& task,
                                       int length, const State& state) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int blocks = (length + kBlock - 1) / kBlock;
  const int chunks = (blocks + args.chunk_blocks - 1) / args.chunk_blocks;
  const Parts parts(args, task.slot * args.kv_heads + task.head, chunks);
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    const float2 sums = {over_rows(state.sum[tile].x, false), over_rows(state.sum[tile].y, false)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * tile + 2 * t + i;
      if (head >= args.group) continue;
      const float sum = i ? sums.y : sums.x, most = i ? state.most[tile].y : state.most[tile].x;
      const float scale = chunks == 1 ? 1.0f / sum : 1.0f;
      float* const part = parts.first + task.chunk * parts.size + head * kPart;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const float2 low = state.low[tile][s], high = state.high[tile][s];
        const float values[2] = {scale * (i ? low.y : low.x), scale * (i ? high.y : high.x)};
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int dim = 16 * s + g + 8 * half;
          if (chunks == 1) {
            parts.store(head * HEAD_DIM + dim, values[half]);
          } else {
            part[dim] = values[half];
          }
        }
      }
      if (chunks > 1 && g == 0) part[HEAD_DIM] = most, part[HEAD_DIM + 1] = sum;
    }
  }
  if (chunks > 1) parts.combine(task.chunk);
}
