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
  int* const totals;      // [experts]: pairs of each, if the launch before counted them
  int* const firsts;      // [experts]: the first pair of these rows

  __device__ __forceinline__ PairOrder(const RouteArgs& args, uint8_t* smem)
      : args(args),
        pairs(reinterpret_cast<Choice*>(smem)),
        masks(reinterpret_cast<uint32_t*>(pairs + min(kMaxRows, args.n) * args.top_k)),
        totals(reinterpret_cast<int*>(masks + kWords * args.experts)),
        firsts(totals + args.experts) {}

  __device__ __forceinline__ void* end() const { return firsts + args.experts; }

  // Comes first.
  __device__ __forceinline__ void clear() const {
    for (int i = threadIdx.x; i < kWords * args.experts; i += kThreads)
      masks[i] = 0;
    __syncthreads();
  }
  // Sets pair `i` of this CTA, and its row in the mask, which may have it already.
  __device__ __forceinline__ void set(int i, const Choice& choice) const {
    pairs[i] = choice;
    const uint32_t row = choice.row;
    if (choice.index >= 0) atomicOr(masks + kWords * choice.index + row / 32, 1u << row % 32);
  }
  // Pairs to and from global memory; two at a time are waited for.
  __device__ __forceinline__ void store(int first, int rows) const {
    for (int i = threadIdx.x; i < rows * args.top_k; i += kThreads)
      ptx::store_to_l2(of_row(first) + i, *reinterpret_cast<const float2*>(pairs + i));
  }
  __device__ __forceinline__ void load(int first, int rows) const {
    const int count = rows * args.top_k;
    for (int i = 2 * threadIdx.x; i < count; i += 2 * kThreads) {
      float4* const from = reinterpret_cast<float4*>(of_row(first) + i);
      const bool second = i + 1 < count;
      float4 both;
      for (;;) {
        both = ptx::load_from_l2(from);
        if (!second) both.z = both.w = 0.0f;
        if (largest_word(both) != kUnwritten) break;
        ptx::spin();
      }
      set_unwritten(from);
      const Choice* const choices = reinterpret_cast<const Choice*>(&both);
      set(i, choices[0]);
      if (second) set(i + 1, choices[1]);
    }
  }

  // Counts the rows of a band that chose each expert, behind a barrier.
  __device__ __forceinline__ void count(int band) const {
    for (int expert = threadIdx.x; expert < args.experts; expert += kThreads)
      args.counts[static_cast<int64_t>(band) * args.experts + expert] = before(expert, kMaxRows);
  }

  // Writes the pairs of `rows` rows from row `first` on.
  __device__ __forceinline__ void write(int first, int rows) const {
    __syncthreads();
    if (rows < args.n) {
      for (int expert = threadIdx.x; expert < args.experts; expert += kThreads) {
        int total = 0, earlier = 0;
#pragma unroll 8
        for (int band = 0; band < band_count(args); band++) {
          const int count = args.counts[band * args.experts + expert];  // of the launch before
          total += count;
          if (band * args.band_rows < first) earlier += count;
        }
        totals[expert] = total, firsts[expert] = earlier;
      }
      __syncthreads();
    }
    if (threadIdx.x < 32) {
      add_up(rows, first == 0);
    } else if (first == 0 && args.use != nullptr) {
      count_use(rows);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * args.top_k; i += kThreads) {
      const Choice choice = pairs[i];
      int pair = -1;
      if (choice.index >= 0) {
        pair = firsts[choice.index] + before(choice.index, choice.row);
        args.tokens[pair] = first + choice.row;
        args.weights[pair] = choice.weight;
      }
      args.pairs[static_cast<int64_t>(first) * args.top_k + i] = pair;
    }
  }

 private:
  __device__ __forceinline__ float2* of_row(int row) const {
    return args.chosen + static_cast<int64_t>(row) * args.top_k;
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
  // The pairs of an expert: those of `rows` rows, or if the launch has more, the bands' sum.
  __device__ __forceinline__ int total(int expert, int rows) const {
    return rows < args.n ? totals[expert] : before(expert, kMaxRows);
  }
  // Adds to counts of use, by all warps but the first.
  __device__ __forceinline__ void count_use(int rows) const {
    for (int expert = threadIdx.x - 32; expert < args.experts; expert += kThreads - 32) {
      const int index = args.stacked == nullptr ? expert : args.stacked[expert];
      const int uses = total(index, rows);
      if (uses == 0) continue;
      atomicAdd(args.use + expert, uses);
      atomicAdd(args.use + args.experts + index, 1);
    }
  }
  // Moves each expert's pairs behind those of the experts before it, by a warp. A lane adds up
  // neighbours; then their sums are added up.
  __device__ __forceinline__ void add_up(int rows, bool stores) const {
    const int lane = threadIdx.x, first = lane * kPerLane;
    int counts[kPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      counts[i] = first + i < args.experts ? total(first + i, rows) : 0;
      sum += counts[i];
    }
    int end = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int more = __shfl_sync(0xffffffff, end, max(lane - distance, 0));
      if (lane >= distance) end += more;
    }
    int at = end - sum;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      const int expert = first + i;
      if (expert >= args.experts) break;
      firsts[expert] = at + (rows < args.n ? firsts[expert] : 0);
      at += counts[i];
      if (stores) args.ends[expert] = at;
    }
  }
};
