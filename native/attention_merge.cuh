// The softmax state of a warp, and how those of a head's chunks come together.
#pragma once

#include "attention_producer.cuh"

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
  static constexpr int kHeads = 2, kParts = 6;  // that are added up at a time

  const SplitKFlashAttnArgs& args;
  const int row, chunks;  // slot times KV heads plus the KV head
  const int size;
  float* const first;
  int* const arrivals;

  __device__ __forceinline__ Parts(const SplitKFlashAttnArgs& args, int row, int chunks)
      : args(args),
        row(row),
        chunks(chunks),
        size(args.group * kPart),
        first(args.partials + static_cast<int64_t>(row) * args.max_chunks * size),
        arrivals(args.arrivals + row * (1 + groups_of(args.max_chunks))) {}

  // Output `i` of the KV head's group.
  __device__ __forceinline__ void store(int i, float value) const {
    convert(args.out[static_cast<int64_t>(row) * args.group * HEAD_DIM + i], value);
  }

  // Once the part of `chunk` is there.
  __device__ __forceinline__ void combine(int chunk) const {
    const int group = chunk / kGroupChunks, groups = groups_of(chunks);
    int* arrived = arrivals + 1 + group;
    float* parts = first + group * kGroupChunks * size;
    int stride = size;
    int count = min(kGroupChunks, chunks - group * kGroupChunks);
#pragma unroll 1
    for (bool whole = groups == 1; last_of(arrived, count); whole = true) {
      add(parts, stride, count, whole);
      if (whole) return;
      arrived = arrivals, parts = first, stride = kGroupChunks * size, count = groups;
    }
  }

 private:
  __device__ __forceinline__ static int groups_of(int chunks) {
    return (chunks + kGroupChunks - 1) / kGroupChunks;
  }

  // Whether the warp is the last of so many to come here, the others' parts being there then.
  __device__ __forceinline__ static bool last_of(int* arrivals, int count) {
    __syncwarp();
    int before = 0;
    if (threadIdx.x % 32 == 0) {
      before = ptx::add_in_order(arrivals, 1);
      if (before == count - 1) *arrivals = 0;
    }
    return __shfl_sync(0xffffffff, before, 0) == count - 1;
  }

  // Adds up `count` parts, at most 16, `stride` apart, into outputs or else into the first of them.
  // Loads are under way together as far as registers allow: to wait for one takes the better part
  // of a microsecond, and that at the end of a kernel.
  __device__ __forceinline__ void add(float* parts, int stride, int count, bool whole) const {
    const int lane = threadIdx.x % 32, dim = min(4 * lane, HEAD_DIM - 4);
#pragma unroll 1
    for (int first_head = 0; first_head < args.group; first_head += kHeads) {
      float4 totals[kHeads], value[kHeads] = {};
      float scale[kHeads];
      const float* from = parts + dim;
      load_heads(totals, parts + min(lane, count - 1) * stride + HEAD_DIM, first_head);
#pragma unroll 1
      for (int part = 0; part < count; part += kParts) {
        float4 more[kParts][kHeads];
#pragma unroll
        for (int j = 0; j < kParts; j++) {
          load_heads(more[j], from, first_head);
          if (part + j + 1 < count) from += stride;
        }
        if (part == 0) weigh(totals, count, whole, scale);
#pragma unroll
        for (int j = 0; j < kParts; j++) {
#pragma unroll
          for (int i = 0; i < kHeads; i++) {
            const float by = __shfl_sync(0xffffffff, scale[i], part + j);  // behind the last: zero
            value[i].x += by * more[j][i].x, value[i].y += by * more[j][i].y;
            value[i].z += by * more[j][i].z, value[i].w += by * more[j][i].w;
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kHeads; i++) {
        const int head = first_head + i;
        if (head < args.group) put(parts, head, value[i], totals[i], whole);
      }
    }
  }

  // What the parts of some heads count by, lane by lane; their totals become those of the whole.
  __device__ __forceinline__ static void weigh(float4* totals, int count, bool whole,
                                               float* scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kHeads; i++) {
      float most = totals[i].x;
#pragma unroll
      for (int far = 1; far < 32; far *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, far));
      const float weight = lane < count ? exp2f(totals[i].x - most) : 0.0f;
      float sum = totals[i].y * weight;
#pragma unroll
      for (int far = 1; far < 32; far *= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, far);
      scale[i] = whole ? weight / sum : weight;
      totals[i] = {most, sum, 0.0f, 0.0f};
    }
  }

  // Four values of each of kHeads, `from` being where head 0 has them; behind the last: its own.
  __device__ __forceinline__ void load_heads(float4* values, const float* from, int head) const {
#pragma unroll
    for (int i = 0; i < kHeads; i++) {
      const float* const of = from + min(head + i, args.group - 1) * kPart;
      values[i] = ptx::load_from_l2(reinterpret_cast<const float4*>(of));
    }
  }

  __device__ __forceinline__ void put(float* parts, int head, const float4& value,
                                      const float4& total, bool whole) const {
    const int lane = threadIdx.x % 32, dim = 4 * lane;
    if (dim >= HEAD_DIM) return;
    if (whole) {
      const int at = head * HEAD_DIM + dim;
      store(at, value.x), store(at + 1, value.y), store(at + 2, value.z), store(at + 3, value.w);
      return;
    }
    float* const part = parts + head * kPart;
    *reinterpret_cast<float4*>(part + dim) = value;
    if (lane == 0) *reinterpret_cast<float4*>(part + HEAD_DIM) = total;
  }
};

// Stores what comes of an item: outputs, or its part.
__device__ __forceinline__ void finish(const SplitKFlashAttnArgs& args, const Task& task,
                                       int length, const State& state) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunks = chunks_of(args, (length + kBlock - 1) / kBlock);
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
