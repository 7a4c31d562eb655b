// The router of a mixture of experts: each row's experts and their weights, and per expert the rows
// that chose it, in the order of rows.
//
// route: of a band of up to 64 rows, a CTA has 16 experts and 512 columns (64 a warp)
//   load the experts' weights, each as the sum of three bfloat16 numbers
//   wait for predecessor kernels
//   for each tile of 8 rows: store logits from these columns, by tensor cores, the warps' added up
// behind these CTAs, those that choose, one warp per row (route_choose.cuh):
//     logits = sums over columns, each waited for
//     scores = softmax(logits) or sigmoid(logits); by = scores + bias
//     hide experts outside the row's best groups, whose two largest `by` have the largest sums
//     take the expert of the largest `by` k times: of equals the first; NaN is the largest
//     weights = scores, divided by their sum if renormalized, * scale
//   up to 64 rows: the last CTA waits for all choices and numbers the pairs of a row and an expert
//   (route_pairs.cuh); more rows: a CTA chooses for a band and counts the rows of each expert, and
// number_pairs: a CTA per band numbers its pairs, behind those of earlier bands
//
// Logits and choices are waited for word by word: who reads one leaves a NaN in its place that no
// arithmetic makes (kUnwritten). A counter would take a fence, an atomic and another load. CTAs
// wait for earlier ones alone, so that all of them can run.
//
// A product of bfloat16 numbers is exact in float32. A weight is the sum of three of them, a
// float16 of two. Sums over columns have one order, whatever the number of rows: a warp's, then
// over warps, then over CTAs.

#include "route_choose.cuh"
#include "route_pairs.cuh"

constexpr int kChunks = 2;                                // of a warp
constexpr int kChunkCols = 32;                            // a lane has 8 of them
constexpr int kPartCols = kWarps * kChunks * kChunkCols;  // of a CTA
constexpr int kTileExperts = ROUTE_EXPERTS;               // of a CTA
constexpr int kTileRows = ROUTE_TILE_ROWS;
constexpr int kWeightParts = 3;            // bfloat16 numbers in a weight,
constexpr int kXParts = BFLOAT16 ? 1 : 2;  // and in an element of x
constexpr int kPadded = kTileExperts + 4;  // floats: no bank conflicts
static_assert(kPartCols == ROUTE_COLS && kTileExperts == 16 && kTileRows == 8, "as mma has them");

// Partial logits of a tile's rows, of each warp. There are two of them.
using Sums = float[kWarps][kTileRows][kPadded];

// Two floats as pairs of bfloat16 numbers, which add up to them if that many can.
template <int parts>
__device__ __forceinline__ void split(float first, float second, uint32_t (&pairs)[parts]) {
  constexpr uint32_t kUpper = 0xffff0000;
#pragma unroll
  for (uint32_t& pair : pairs) {
    const uint32_t low = __float_as_uint(first) & kUpper, high = __float_as_uint(second) & kUpper;
    pair = low >> 16 | high;
    first -= __uint_as_float(low), second -= __uint_as_float(high);
  }
}

// A word of two elements of x as such pairs.
__device__ __forceinline__ void split(uint32_t word, uint32_t (&pairs)[kXParts]) {
#if BFLOAT16
  pairs[0] = word;
#else
  const float2 both = unpacked(word);
  split(both.x, both.y, pairs);
#endif
}

// The lane's columns in chunk `chunk` of a CTA's: 8 from here.
__device__ __forceinline__ int column(int part, int chunk) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return part * kPartCols + (warp * kChunks + chunk) * kChunkCols + lane % 4 * 8;
}

// The weights of a CTA's experts in a warp's columns, as operands of mma.
struct Weights {
  uint32_t parts[kChunks][2][kWeightParts][4];

  __device__ __forceinline__ void load(const RouteArgs& args, int first_expert, int part) {
    const int lane = threadIdx.x % 32;
    float4 loaded[kChunks][2][2] = {};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {  // 8 experts
        const int expert = first_expert + 8 * half + lane / 4, col = column(part, chunk);
        if (expert >= args.experts || col >= args.hidden) continue;
        const float4* const from = reinterpret_cast<const float4*>(
            args.weight + static_cast<int64_t>(expert) * args.hidden + col);
        loaded[chunk][half][0] = from[0], loaded[chunk][half][1] = from[1];
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kChunks; i++) {
      const int chunk = i / 4, half = i / 2 % 2, four = i % 2;
      const float4 w = loaded[chunk][half][four];
      uint32_t low[kWeightParts], high[kWeightParts];
      split(w.x, w.y, low), split(w.z, w.w, high);
#pragma unroll
      for (int j = 0; j < kWeightParts; j++)
        parts[chunk][four][j][half] = low[j], parts[chunk][four][j][2 + half] = high[j];
    }
  }
};

// A tile's rows in a warp's columns; zeros where there are none.
struct TileRows {
  float4 chunks[kChunks];  // words of two elements, which are unpacked when they are needed

  __device__ __forceinline__ void load(const RouteArgs& args, int first, int end, int part) {
    const int row = first + threadIdx.x % 32 / 4;
    const Element* const from = args.x + static_cast<int64_t>(row) * args.hidden;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
      const int col = column(part, chunk);
      chunks[chunk] = ptx::load_from_l2_or_zero(reinterpret_cast<const float4*>(from + col),
                                                row < end && col < args.hidden);
    }
  }
  // Products with the weights, summed over the columns, for each expert and row.
  __device__ __forceinline__ void multiply(const Weights& weights, Sums& to) const {
    float2 sums[kWeightParts][2] = {};  // of experts 0 to 7, and 8 to 15
#pragma unroll
    for (int i = 0; i < 2 * kChunks; i++) {
      const float4& chunk = chunks[i / 2];
      uint32_t low[kXParts], high[kXParts];
      split(__float_as_uint(i % 2 ? chunk.z : chunk.x), low);
      split(__float_as_uint(i % 2 ? chunk.w : chunk.y), high);
#pragma unroll
      for (int j = 0; j < kWeightParts * kXParts; j++) {
        float2(&sum)[2] = sums[j % kWeightParts];
        ptx::mma(sum[0], sum[1], weights.parts[i / 2][i % 2][j % kWeightParts],
                 low[j / kWeightParts], high[j / kWeightParts], __nv_bfloat16());
      }
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float* const at = to[warp][lane % 4 * 2] + 8 * half + lane / 4;
      const float2 &a = sums[0][half], &b = sums[1][half], &c = sums[2][half];  // largest first
      at[0] = a.x + (b.x + c.x), at[kPadded] = a.y + (b.y + c.y);
    }
  }
};

// Logits of a CTA's experts for rows `first` to `end` - 1, from its columns. Two tiles are loaded
// ahead: ptxas lets a loop's load of the next one wait for the last.
__device__ __forceinline__ void multiply(const RouteArgs& args, const Weights& weights,
                                         int first_expert, int part, int first, int end,
                                         Sums (&sums)[2]) {
  TileRows rows, next;
  rows.load(args, first, end, part), next.load(args, first + kTileRows, end, part);
#pragma unroll 1
  for (int turn = 0; first < end; first += kTileRows, turn ^= 1) {
    rows.multiply(weights, sums[turn]);
    rows = next;
    next.load(args, first + 2 * kTileRows, end, part);
    __syncthreads();
    const int row = first + threadIdx.x / kTileExperts;
    const int number = threadIdx.x % kTileExperts, expert = first_expert + number;
    if (threadIdx.x >= kTileExperts * kTileRows || row >= end) continue;
    float sum = 0.0f;
#pragma unroll
    for (const auto& of_warp : sums[turn])
      sum += of_warp[row - first][number];
    const int64_t of_row = static_cast<int64_t>(part) * args.n + row;
    ptx::store_to_l2(args.logits + of_row * kMaxExperts + expert, sum);
  }
}

// Choose the experts of `rows` rows from row `first` on. The CTA of the last rows numbers the
// pairs of up to kMaxRows.
__device__ __forceinline__ void choose_rows(const RouteArgs& args, int first, int rows,
                                            uint8_t* smem) {
  const PairOrder order(args, smem);
  order.clear();
  if (threadIdx.x * kLine < args.experts) {
    if (args.bias != nullptr) ptx::prefetch(args.bias + threadIdx.x * kLine);
    if (args.stacked != nullptr) ptx::prefetch(args.stacked + threadIdx.x * kLine);
  }
  ptx::wait_for_dependencies();
  const int warp = threadIdx.x / 32, origin = args.n > kMaxRows ? first : 0;
  float* const by = reinterpret_cast<float*>(order.end()) + warp * args.experts;
  for (int row = warp; row < rows; row += kWarps)
    choose(args, origin, first + row - origin, by, order, row * args.top_k);
  if (rows < args.n) {
    __syncthreads();
    order.store(first, rows);
    if (args.n > kMaxRows) return order.count(first / args.band_rows);
    if (first + rows < args.n) return;
    __syncthreads();
    order.load(0, args.n);
  }
  order.write(0, args.n);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    route(const __grid_constant__ RouteArgs args) {
  extern __shared__ __align__(1024) uint8_t smem[];
  ptx::launch_dependents();
  const int tiles = ceil_div(args.experts, kTileExperts), units = tiles * part_count(args);
  const int band = blockIdx.x / units, unit = blockIdx.x % units;
  if (band >= band_count(args)) {
    const int first = (blockIdx.x - band_count(args) * units) * args.chooser_rows;
    if (first >= args.n) return fill_sm();
    return choose_rows(args, first, min(args.chooser_rows, args.n - first), smem);
  }
  const int first = band * args.band_rows, end = min(first + args.band_rows, args.n);
  const int first_expert = unit % tiles * kTileExperts, part = unit / tiles;
  Weights weights;
  weights.load(args, first_expert, part);
  ptx::wait_for_dependencies();
  multiply(args, weights, first_expert, part, first, end, *reinterpret_cast<Sums(*)[2]>(smem));
}

using NumberPairsArgs = RouteArgs;

extern "C" __global__ void __launch_bounds__(kThreads)
    number_pairs(const __grid_constant__ NumberPairsArgs args) {
  extern __shared__ __align__(1024) uint8_t smem[];
  ptx::launch_dependents();
  const PairOrder order(args, smem);
  order.clear();
  ptx::wait_for_dependencies();
  const int first = blockIdx.x * args.band_rows, rows = min(args.band_rows, args.n - first);
  order.load(first, rows);
  order.write(first, rows);
}
