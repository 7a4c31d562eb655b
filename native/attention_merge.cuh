// The softmax state of a warp, and how those of a head's chunks come together.
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

// Of a KV head's chunks, the parts that warps leave: [chunks][group][kPart], and how many of them
// are there. `row` is its slot times the KV heads, plus itself.
struct Parts {
  const SplitKFlashAttnArgs& args;
  const int row, chunks, size;
  float* const first;

  __device__ __forceinline__ Parts(const SplitKFlashAttnArgs& args, int row)
      : args(args),
        row(row),
        chunks(chunks_of(args, blocks_of(args, row / args.kv_heads))),
        size(args.group * kPart),
        first(args.partials + static_cast<int64_t>(row) * args.max_chunks * size) {}

  __device__ __forceinline__ Element* outputs(int head) const {
    return args.out + (static_cast<int64_t>(row) * args.group + head) * HEAD_DIM;
  }

  // By a lane for the warp's part, then for all of them: whether it was the last to come.
  __device__ __forceinline__ bool arrive() const {
    const bool last = ptx::add_in_order(args.arrivals + row, 1) == chunks - 1;
    if (last) args.arrivals[row] = 0;
    return last;
  }

  // Adds up all parts of some heads, in their order, into their outputs: those behind the last head
  // are its own once more. Of up to 32 * kTotals parts kParts are under way together: to wait for
  // one takes the better part of a microsecond, and that at the end of a kernel.
  template <int kHeads, int kParts, int kTotals>
  __device__ __forceinline__ void add_up(int first_head) const {
    const int lane = threadIdx.x % 32;
    const float* of_head[kHeads];
    float2 totals[kHeads][kTotals];  // largest score and sum of weights of part lane + 32 i
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
      of_head[h] = first + min(first_head + h, args.group - 1) * kPart;
#pragma unroll
      for (int i = 0; i < kTotals; i++) {
        const int part = 32 * i + lane;
        totals[h][i] = {kNone, 0.0f};
        if (part < chunks) totals[h][i] = ptx::load_from_l2(total_of(of_head[h] + part * size));
      }
    }
    float4 value[kHeads] = {}, more[kParts][kHeads];
    load(more, of_head, 0);
#pragma unroll
    for (int h = 0; h < kHeads; h++)
      weigh(totals[h]);
#pragma unroll
    for (int i = 0; i < kTotals; i++) {
#pragma unroll
      for (int within = 0; within < 32; within += kParts) {
        if (32 * i + within >= chunks) break;
        if (i + within > 0) load(more, of_head, 32 * i + within);
#pragma unroll
        for (int j = 0; j < kParts; j++) {
#pragma unroll
          for (int h = 0; h < kHeads; h++) {
            const float by = __shfl_sync(0xffffffff, totals[h][i].x, within + j);
            value[h].x += by * more[j][h].x, value[h].y += by * more[j][h].y;
            value[h].z += by * more[j][h].z, value[h].w += by * more[j][h].w;
          }
        }
      }
    }
    if (4 * lane >= HEAD_DIM) return;
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
      const int head = min(first_head + h, args.group - 1);
      uint32_t* const out = reinterpret_cast<uint32_t*>(outputs(head) + 4 * lane);
      out[0] = packed(value[h].x, value[h].y), out[1] = packed(value[h].z, value[h].w);
    }
  }

 private:
  __device__ __forceinline__ static const float2* total_of(const float* part) {
    return reinterpret_cast<const float2*>(part + HEAD_DIM);
  }

  // Four values of each of some parts; behind the last: zeros.
  template <int kParts, int kHeads>
  __device__ __forceinline__ void load(float4 (&values)[kParts][kHeads],
                                       const float* const (&of_head)[kHeads], int from) const {
    const int dim = min(4 * static_cast<int>(threadIdx.x % 32), HEAD_DIM - 4);
#pragma unroll
    for (int j = 0; j < kParts; j++) {
#pragma unroll
      for (int h = 0; h < kHeads; h++) {
        values[j][h] = {};
        if (from + j >= chunks) continue;
        const float* const part = of_head[h] + (from + j) * size + dim;
        values[j][h] = ptx::load_from_l2(reinterpret_cast<const float4*>(part));
      }
    }
  }

  // Puts what each part counts by in the place of its largest score; behind the last: zero.
  template <int kTotals>
  __device__ __forceinline__ static void weigh(float2 (&totals)[kTotals]) {
    float most = kNone, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTotals; i++)
      most = fmaxf(most, totals[i].x);
#pragma unroll
    for (int far = 1; far < 32; far *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, far));
#pragma unroll
    for (int i = 0; i < kTotals; i++) {
      totals[i].x = exp2f(totals[i].x - most);
      sum += totals[i].x * totals[i].y;
    }
#pragma unroll
    for (int far = 1; far < 32; far *= 2)
      sum += __shfl_xor_sync(0xffffffff, sum, far);
#pragma unroll
    for (int i = 0; i < kTotals; i++)
      totals[i].x /= sum;
  }
};

// Stores an item's outputs, or where its KV head has several chunks its part.
__device__ __forceinline__ void store(const Parts& parts, int chunk, const State& state) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool whole = parts.chunks == 1;
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    const float2 sums = {over_rows(state.sum[tile].x, false), over_rows(state.sum[tile].y, false)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * tile + 2 * t + i;
      if (head >= parts.args.group) continue;
      const float sum = i ? sums.y : sums.x, most = i ? state.most[tile].y : state.most[tile].x;
      const float scale = whole ? 1.0f / sum : 1.0f;
      Element* const out = parts.outputs(head);
      float* const part = parts.first + chunk * parts.size + head * kPart;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const float2 low = state.low[tile][s], high = state.high[tile][s];
        const float values[2] = {scale * (i ? low.y : low.x), scale * (i ? high.y : high.x)};
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int dim = 16 * s + g + 8 * half;
          if (whole) {
            convert(out[dim], values[half]);
          } else {
            part[dim] = values[half];
          }
        }
      }
      if (!whole && g == 0) part[HEAD_DIM] = most, part[HEAD_DIM + 1] = sum;
    }
  }
}

// What becomes of the parts that a warp leaves. Whoever is the last of a KV head adds them up: few
// of them at once; many at the end of a CTA, where all its warps share that work, and only where a
// warp has more KV heads waiting than fit here before.
struct Leaver {
  static constexpr int kFew = 8, kNotLast = -1;

  const SplitKFlashAttnArgs& args;
  Shared& shared;
  int* const rows;  // of the warp's parts that wait
  int count = 0;

  __device__ __forceinline__ Leaver(const SplitKFlashAttnArgs& args, Shared& shared)
      : args(args), shared(shared), rows(shared.left[threadIdx.x / 32]) {}

  __device__ __forceinline__ void leave(const Task& task, const State& state) {
    const int row = task.slot * args.kv_heads + task.head;
    const Parts parts(args, row);
    store(parts, task.chunk, state);
    if (parts.chunks == 1) return;
    if (threadIdx.x % 32 == 0) rows[count] = row;
    if (parts.chunks > kFew) {
      count++;
    } else if (arrive(count, 1)) {
#pragma unroll 1
      for (int head = 0; head < args.group; head += 2)
        parts.add_up<2, 4, 1>(head);
    }
  }
  __device__ __forceinline__ bool full() const { return count == kMostLeft; }

  // Of the warp's rows alone, or at the end, when no warp has any more items, of all of them.
  __device__ __forceinline__ void add_up(bool end) {
    if (args.max_chunks <= kFew) return;
    const uint32_t last = arrive(0, count);
    const int lane = threadIdx.x % 32;
    if (lane < kMostLeft && !(last >> lane & 1)) rows[lane] = kNotLast;
    if (end) ptx::named_barrier_sync(kMergeBarrier, 32 * kWarps);
    __syncwarp();
    const int* const from = end ? shared.left[0] : rows;
    const int entries = end ? kWarps * kMostLeft : kMostLeft, warps = end ? kWarps : 1;
    int head = end ? threadIdx.x / 32 : 0;  // of the row, where warps take heads in turns
#pragma unroll 1
    for (int i = 0; i < entries; i++) {
      if (from[i] == kNotLast) continue;
#pragma unroll 1
      for (; head < args.group; head += warps)
        Parts(args, from[i]).add_up<1, 16, kMostChunks / 32>(head);
      head -= args.group;
    }
    __syncwarp();
    count = 0;
  }

 private:
  // Says that the warp's parts of some of the rows are there: the bits of those that now have all.
  __device__ __forceinline__ uint32_t arrive(int from, int count) const {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const bool last = lane >= from && lane < from + count && Parts(args, rows[lane]).arrive();
    return __ballot_sync(0xffffffff, last);
  }
};
