// The numbers of pairs of a row and an expert: experts one after the other, each with its rows in
// order. Experts are in the order of their stack indices, since those that are read often may be
// stacked first. `expert` is a stack index here, but an expert's number in count_use().
#pragma once

#include "route.cuh"

// By a CTA, in shared memory.
struct PairOrder {
  static constexpr int kWords = kMaxRows / 32;

  const RouteArgs& args;
  Choice* const pairs;    // [rows, top_k]
  uint32_t* const masks;  // [experts][kWords]: rows that chose an expert
  int* const totals;      // [experts]: pairs of each
  int* const firsts;      // [experts]: the first pair of these rows

  __device__ __forceinline__ PairOrder(const RouteArgs& args, uint8_t* smem)
      : args(args),
        pairs(reinterpret_cast<Choice*>(smem)),
        masks(reinterpret_cast<uint32_t*>(pairs + min(kMaxRows, args.n) * args.top_k)),
        totals(reinterpret_cast<int*>(masks + kWords * args.experts)),
        firsts(totals + args.experts) {}

  __device__ __forceinline__ void* end() const { return firsts + args.experts; }

  // Pairs to and from global memory. mark() comes behind a barrier.
  __device__ __forceinline__ void store(int first, int rows) const {
    for (int i = threadIdx.x; i < rows * args.top_k; i += kThreads)
      of_row(first)[i] = {__uint_as_float(pairs[i].index), pairs[i].weight};
  }
  __device__ __forceinline__ void load(int first, int rows) const {
    for (int i = threadIdx.x; i < rows * args.top_k; i += kThreads) {
      const float2 pair = ptx::load_from_l2(of_row(first) + i);
      pairs[i] = {static_cast<int>(__float_as_uint(pair.x)), pair.y};
    }
  }

  // Counts the rows of a band that chose each expert.
  __device__ __forceinline__ void count(int band, int rows) const {
    mark(rows);
    for (int expert = threadIdx.x; expert < args.experts; expert += kThreads)
      args.counts[static_cast<int64_t>(band) * args.experts + expert] = before(expert, kMaxRows);
  }

  // Writes the pairs of `rows` rows from row `first` on.
  __device__ __forceinline__ void write(int first, int rows) const {
    mark(rows);
    for (int expert = threadIdx.x; expert < args.experts; expert += kThreads) {
      int total = 0, earlier = 0;
      if (rows == args.n) {
        total = before(expert, kMaxRows);
      } else {
#pragma unroll 8
        for (int band = 0; band < band_count(args); band++) {
          const int count = args.counts[band * args.experts + expert];  // of the launch before
          total += count;
          if (band * args.band_rows < first) earlier += count;
        }
      }
      totals[expert] = total, firsts[expert] = earlier;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      add_up(first == 0);
    } else if (first == 0 && args.use != nullptr) {
      count_use();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * args.top_k; i += kThreads) {
      const Choice choice = pairs[i];
      const int row = i / args.top_k;
      int pair = -1;
      if (choice.index >= 0) {
        pair = firsts[choice.index] + before(choice.index, row);
        args.tokens[pair] = first + row;
        args.weights[pair] = choice.weight;
      }
      args.pairs[static_cast<int64_t>(first) * args.top_k + i] = pair;
    }
  }

 private:
  __device__ __forceinline__ float2* of_row(int row) const {
    return args.chosen + static_cast<int64_t>(row) * args.top_k;
  }
  // Writes `masks`: which rows chose which experts.
  __device__ __forceinline__ void mark(int rows) const {
    for (int i = threadIdx.x; i < kWords * args.experts; i += kThreads)
      masks[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rows * args.top_k; i += kThreads) {
      const int row = i / args.top_k, index = pairs[i].index;
      if (index >= 0) atomicOr(masks + kWords * index + row / 32, 1u << row % 32);
    }
    __syncthreads();
  }
  // The number of rows before `row` that chose an expert.
  __device__ __forceinline__ int before(int expert, int row) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const int bits = min(max(row - 32 * i, 0), 32);
      const uint32_t mask = masks[kWords * expert + i];
      count += __popc(bits == 32 ? mask : mask & ((1u << bits) - 1));
    }
    return count;
  }
  // Adds to counts of use, by all warps but the first.
  __device__ __forceinline__ void count_use() const {
    for (int expert = threadIdx.x - 32; expert < args.experts; expert += kThreads - 32) {
      const int index = args.stacked == nullptr ? expert : args.stacked[expert];
      if (totals[index] == 0) continue;
      atomicAdd(args.use + expert, totals[index]);
      atomicAdd(args.use + args.experts + index, 1);
    }
  }
  // Moves each expert's pairs behind those of the experts before it, by a warp. A lane adds up
  // neighbours; then their sums are added up.
  __device__ __forceinline__ void add_up(bool stores) const {
    const int lane = threadIdx.x, each = ceil_div(args.experts, 32);
    const int first = lane * each, last = min(first + each, args.experts);
    int sum = 0;
    for (int i = first; i < last; i++)
      sum += totals[i];
    int end = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int more = __shfl_sync(0xffffffff, end, max(lane - distance, 0));
      if (lane >= distance) end += more;
    }
    int at = end - sum;
    for (int i = first; i < last; i++) {
      firsts[i] += at;
      at += totals[i];
      if (stores) args.ends[i] = at;
    }
  }
};
