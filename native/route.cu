// The router of a mixture of experts: each row's experts and their weights, and per expert the rows
// that chose it, in the order of rows.
//
//   a CTA has a tile of 32 rows and one expert per warp:
//     prefetch the experts' weights
//     wait for predecessor kernels
//     logits of its experts: a lane has every 32nd chunk of 8 columns
//   the tile's last CTA, one warp per row:
//     scores = softmax(logits) or sigmoid(logits); by = scores + bias
//     hide experts outside the row's best groups, whose two largest `by` have the largest sums
//     take the expert of the largest `by` k times: of equal ones the first, as NaN is the largest
//     weights = scores, divided by their sum if renormalized, * scale
//     store the row's experts in ascending order, each by its place in the stacked matrices, and
//     for each of these a mask of the tile's rows
//   the last CTA of all:
//     count the rows of each expert, add up the counts, and give every pair of a row and an expert
//     its place: experts one after the other, each with its rows in order
//   Experts that are read often may be stacked first; choices and the order of sums go by number.

#include "common.cuh"
#include "cta_reduce.cuh"
#include "element.cuh"

constexpr int kThreads = 32 * ROUTE_WARPS;
constexpr int kTileRows = ROUTE_TILE_ROWS;
constexpr int kMaxExperts = ROUTE_MAX_EXPERTS;
constexpr int kRowsAtOnce = 8;
constexpr int kPerLane = kMaxExperts / 32;
constexpr int kLine = 32;  // floats of a line of the cache
static_assert(kTileRows == 32, "a mask of a tile's rows is a word");

struct RouteArgs {
  const Element* x;     // [n, hidden]
  const float* weight;  // [experts, hidden]
  const float* bias;    // [experts], or null: 0
  const int* lengths;   // [n], negative in rows without a request, which choose none; or null
  int* tokens;          // [n * top_k]: the row of each pair
  float* weights;       // [n * top_k]: the weight of each pair
  int* ends;            // [experts]: pairs of the experts up to this one
  int* places;          // [n, top_k]: pairs of a row by ascending expert; -1 without a request
  const int* stacked;   // [experts]: the place of each in stacked matrices; null: its number
  int* use;             // [2, experts]: rows that chose each, launches that read a place; or null
  float* logits;        // [n, experts], scratch, as are the next three
  float2* chosen;       // [n, top_k]: an expert's number, as bits, and its weight
  float2* masks;        // [tiles, experts]: rows of a tile, and pairs of earlier tiles, as bits
  int* arrivals;        // [tiles + 1], zeros before and after
  int n, hidden, experts, top_k;
  int groups, top_groups;
  int sigmoid, renormalized;
  float scale;
};

// Larger floats have larger keys; NaN is the largest, and both zeros are equal.
__device__ __forceinline__ uint32_t ordered(float value) {
  if (value != value) return 0xffffffff;
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Key to maximize: the larger value, then the lower number. 0 is below all keys.
__device__ __forceinline__ uint64_t key(float value, int number) {
  return static_cast<uint64_t>(ordered(value)) << 32 | ~static_cast<uint32_t>(number);
}
__device__ __forceinline__ int number_of(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

__device__ __forceinline__ uint64_t largest(uint64_t value) {
  return reduce_warp(value, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}
__device__ __forceinline__ float total(float value) {
  return reduce_warp(value, [](float a, float b) { return a + b; });
}

// Whether this CTA arrives last of `count`. What the others wrote before, its threads read past L1.
__device__ __forceinline__ bool arrives_last(int* arrivals, int count, int& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared = ptx::atomic_add_acq_rel(arrivals, 1) == count - 1;
    if (shared) *arrivals = 0;
  }
  __syncthreads();
  return shared;
}

// Logits of one expert for rows `first` to `first` + `rows` - 1, by a warp.
__device__ __forceinline__ void multiply(const RouteArgs& args, int expert, int first, int rows) {
  const int lane = threadIdx.x % 32, chunks = args.hidden / 8;
  const float4* const weight =
      reinterpret_cast<const float4*>(args.weight + static_cast<int64_t>(expert) * args.hidden);
#pragma unroll 1
  for (int row = 0; row < rows; row += kRowsAtOnce) {
    float sums[kRowsAtOnce] = {};
#pragma unroll 2
    for (int i = lane; i < chunks; i += 32) {
      const float4 low = weight[2 * i], high = weight[2 * i + 1];
      const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; r++) {
        const int64_t at = first + min(row + r, rows - 1);
        const Chunk x = reinterpret_cast<const Chunk*>(args.x + at * args.hidden)[i];
#pragma unroll
        for (int j = 0; j < 8; j++)
          sums[r] += w[j] * to_float(x.of[j]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; r++) {
      const float sum = total(sums[r]);
      if (lane == r && row + r < rows)
        args.logits[static_cast<int64_t>(first + row + r) * args.experts + expert] = sum;
    }
  }
}

// The sum of the two largest of `by` in a group, whose experts follow each other.
__device__ __forceinline__ float group_score(const float* by, int size) {
  float best = by[0], second = by[1];
  if (ordered(second) > ordered(best)) best = by[1], second = by[0];
  for (int i = 2; i < size; i++) {
    if (ordered(by[i]) > ordered(best))
      second = best, best = by[i];
    else if (ordered(by[i]) > ordered(second))
      second = by[i];
  }
  return best + second;
}

// Choose the experts of one row, by a warp. `by` and `picked`, [experts], are its own shared memory;
// `picked` becomes 1 for each chosen expert.
__device__ __forceinline__ void choose(const RouteArgs& args, int row, float* by, uint8_t* picked) {
  const int lane = threadIdx.x % 32, experts = args.experts;
  const float* const logits = args.logits + static_cast<int64_t>(row) * experts;
  float scores[kPerLane];
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int expert = 32 * i + lane;
    if (expert >= experts) continue;
    scores[i] = ptx::load_from_l2(logits + expert);
    best = max(best, key(scores[i], expert));
  }
  float sum = 0.0f;
  const float maximum = ptx::load_from_l2(logits + number_of(largest(best)));
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    if (32 * i + lane >= experts) continue;
    scores[i] = args.sigmoid ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - maximum);
    sum += scores[i];
  }
  sum = args.sigmoid ? 1.0f : total(sum);
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int expert = 32 * i + lane;
    if (expert >= experts) continue;
    scores[i] = scores[i] / sum;
    by[expert] = args.bias == nullptr ? scores[i] : scores[i] + args.bias[expert];
    picked[expert] = 0;
  }
  __syncwarp();
  // Bit g: whether experts of group g can be chosen.
  const int size = experts / args.groups;
  uint32_t open = 0xffffffff;
  if (args.groups > 1) {
    uint64_t own = lane < args.groups ? key(group_score(by + lane * size, size), lane) : 0;
    open = 0;
    for (int i = 0; i < args.top_groups; i++) {
      const int group = number_of(largest(own));
      open |= 1u << group;
      if (lane == group) own = 0;
    }
  }
  // Lane i keeps the i-th expert and its weight.
  uint64_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int expert = 32 * i + lane;
    keys[i] = 0;
    if (expert < experts && (args.groups == 1 || open >> (expert / size) & 1))
      keys[i] = key(by[expert], expert);
  }
  int mine = kMaxExperts;
  float weight = 0.0f;
  for (int k = 0; k < args.top_k; k++) {
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++)
      own = max(own, keys[i]);
    const int expert = number_of(largest(own));
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (32 * i + lane != expert) continue;
      keys[i] = 0;
      score = scores[i];
    }
    score = __shfl_sync(0xffffffff, score, expert % 32);
    if (lane == k) mine = expert, weight = score;
  }
  if (args.renormalized) weight /= total(weight) + (args.sigmoid ? 1e-20f : 0.0f);
  int rank = 0;
  for (int i = 0; i < args.top_k; i++)
    rank += __shfl_sync(0xffffffff, mine, i) < mine;
  if (lane >= args.top_k) return;
  if (args.stacked != nullptr) mine = args.stacked[mine];
  picked[mine] = 1;
  args.chosen[static_cast<int64_t>(row) * args.top_k + rank] =
      float2{__uint_as_float(static_cast<uint32_t>(mine)), weight * args.scale};
}

// Give every pair its place, by one CTA. `ends` [experts] is shared memory.
__device__ __forceinline__ void place(const RouteArgs& args, int tiles, int* ends) {
  for (int number = threadIdx.x; number < args.experts; number += kThreads) {
    const int expert = args.stacked == nullptr ? number : args.stacked[number];  // by its place
    uint32_t pairs = 0;
#pragma unroll 4
    for (int tile = 0; tile < tiles; tile++) {
      float2* const at = args.masks + static_cast<int64_t>(tile) * args.experts + expert;
      const float2 mask = ptx::load_from_l2(at);
      *at = float2{mask.x, __uint_as_float(pairs)};
      pairs += __popc(__float_as_uint(mask.x));
    }
    ends[expert] = pairs;
    if (args.use != nullptr && pairs > 0) {
      args.use[number] += pairs;
      args.use[args.experts + expert] += 1;
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // a lane adds up neighbours; then their sums are added up
    const int each = (args.experts + 31) / 32, first = threadIdx.x * each;
    int sum = 0, before = 0;
    for (int i = first; i < min(first + each, args.experts); i++)
      ends[i] = sum += ends[i];
    for (int i = 0; i < 32; i++) {
      const int other = __shfl_sync(0xffffffff, sum, i);
      if (i < static_cast<int>(threadIdx.x)) before += other;
    }
    for (int i = first; i < min(first + each, args.experts); i++) {
      ends[i] += before;
      args.ends[i] = ends[i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < args.n * args.top_k; i += kThreads) {
    const int row = i / args.top_k, bit = row % kTileRows;
    int pair = -1;
    if (args.lengths == nullptr || args.lengths[row] >= 0) {
      const float2 chosen = ptx::load_from_l2(args.chosen + i);
      const int expert = static_cast<int>(__float_as_uint(chosen.x));
      const int64_t tile = row / kTileRows;
      const float2 mask = ptx::load_from_l2(args.masks + tile * args.experts + expert);
      const uint32_t rows = __float_as_uint(mask.x);
      pair = (expert > 0 ? ends[expert - 1] : 0) + static_cast<int>(__float_as_uint(mask.y)) +
             __popc(rows & ((1u << bit) - 1));
      args.tokens[pair] = row;
      args.weights[pair] = chosen.y;
    }
    args.places[i] = pair;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    route(const __grid_constant__ RouteArgs args) {
  extern __shared__ __align__(1024) uint8_t smem[];
  float* const by = reinterpret_cast<float*>(smem);                          // [warps, experts]
  uint8_t* const picked = smem + sizeof(float) * ROUTE_WARPS * args.experts;  // [rows, experts]
  __shared__ int last;
  ptx::launch_dependents();
  const int parts = (args.experts + ROUTE_WARPS - 1) / ROUTE_WARPS;
  const int tiles = (args.n + kTileRows - 1) / kTileRows;
  const int tile = blockIdx.x / parts, warp = threadIdx.x / 32;
  if (tile >= tiles) return fill_sm();
  const int expert = blockIdx.x % parts * ROUTE_WARPS + warp;
  const int first = tile * kTileRows, rows = min(kTileRows, args.n - first);
  if (expert < args.experts) {
    const float* const weight = args.weight + static_cast<int64_t>(expert) * args.hidden;
    for (int i = threadIdx.x % 32 * kLine; i < args.hidden; i += 32 * kLine)
      ptx::prefetch(weight + i);
  }
  ptx::wait_for_dependencies();
  if (expert < args.experts) multiply(args, expert, first, rows);
  if (!arrives_last(args.arrivals + tile, parts, last)) return;
  for (int row = warp; row < rows; row += ROUTE_WARPS) {
    const int length = args.lengths == nullptr ? 0 : args.lengths[first + row];
    if (length >= 0) {
      choose(args, first + row, by + warp * args.experts, picked + row * args.experts);
      __syncwarp();  // the next row uses `by` again
    } else {
      for (int i = threadIdx.x % 32; i < args.experts; i += 32)
        picked[row * args.experts + i] = 0;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < args.experts; i += kThreads) {
    uint32_t mask = 0;
    for (int row = 0; row < rows; row++)
      mask |= static_cast<uint32_t>(picked[row * args.experts + i]) << row;
    args.masks[static_cast<int64_t>(tile) * args.experts + i] =
        float2{__uint_as_float(mask), 0.0f};
  }
  if (arrives_last(args.arrivals + tiles, tiles, last))
    place(args, tiles, reinterpret_cast<int*>(smem));
}
