// Decode attention: a new token of every slot attends to the slot's cached keys and values, which
// lie in several memory tiers, and to its own, which are appended to the cache.
//
// A slot's cache is [KV heads][blocks of 64 positions][keys, values], each [HEAD_DIM / 8][64][8]
// elements: any 8 x 8 elements that a matrix load asks for are 128 bytes in a row. Blocks, one copy
// each, go through a ring of stages; of every block each of four warps takes 16 positions, keeps a
// softmax of its own (Milakov, Gimelshein 2018; FlashAttention-2, arXiv 2307.08691), and for all
// query heads of a KV head at once: keys and values are the A operands, queries and probabilities
// the B operands, so that the tensor cores read them once for a group.
//
// What is computed at a time, an item, is a chunk of blocks of one KV head of one slot. Chunks
// depend on what a cache has room for, and their results are added up in order, so neither tiers
// nor batches nor CTAs change a bit. A tier's CTAs share its items so that each reads as many
// blocks.

#include "attention_merge.cuh"
#include "splitk_flash_attn.cuh"

struct Ring {
  Barriers full_barrier;   // [stages]: a block has landed
  Barriers empty_barrier;  // [stages]: all warps are done with it
  uint32_t first;
  int stages;

  __device__ __forceinline__ Ring(const SplitKFlashAttnArgs& args, uint64_t* barriers)
      : full_barrier{ptx::smem_address(barriers)},
        empty_barrier{full_barrier[kMaxStages]},
        first(ptx::smem_address(smem)),
        stages(args.stages) {}

  __device__ __forceinline__ void initialize() const {
    for (int i = 0; i < stages; i++) {
      ptx::mbarrier_init(full_barrier[i], 1);
      ptx::mbarrier_init(empty_barrier[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
};

// One thread. Cached blocks do not depend on the kernels before: what the new token adds to the
// last block of a slot does not come from the cache.
__device__ __forceinline__ void produce(const SplitKFlashAttnArgs& args, const Ring& ring,
                                        Items items, int window) {
  RingPosition fill, landed;
  fill.parity = 1;  // the phase before an empty barrier's first: all stages start free
  int issued = 0;
  for (; !items.done(); items.next()) {
    for (int i = 0; i < items.block_count(); i++, issued++) {
      if (window < ring.stages && issued >= window) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(ring.stages);
      }
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity);
      const uint32_t barrier = ring.full_barrier[fill.stage];
      ptx::mbarrier_arrive_expect_tx(barrier, kBlockBytes);
      ptx::bulk_load(ring.first + fill.stage * kBlockBytes, items.block(i), kBlockBytes, barrier);
      fill.advance(ring.stages);
    }
  }
}

// Rotates dimension `dim` of a head, less than half of them, and its partner half of them further
// to a position (RoPE, arXiv 2104.09864, halves as in Llama).
__device__ __forceinline__ void rotate(const float2* rotations, int dim, float& first,
                                       float& second) {
  const float2 turn = rotations[dim];
  const float before = first;
  first = before * turn.x - second * turn.y;
  second = second * turn.x + before * turn.y;
}

// Those of the new token of a slot, [HEAD_DIM / 2], or null.
__device__ __forceinline__ const float2* rotations_of(const SplitKFlashAttnArgs& args, int slot) {
  if (args.rotations == nullptr) return nullptr;
  return args.rotations + static_cast<int64_t>(args.lengths[slot]) * (HEAD_DIM / 2);
}

__device__ __forceinline__ uint32_t packed(float first, float second) {
  Pair pair;
  convert(pair.first, first), convert(pair.second, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Queries of a group as B operand: lane 4g + t has the dimensions 16 s + 2t, + 1 and 8 more of
// query head g of each tile of 8 heads.
struct Queries {
  uint32_t step[GROUP_TILES][kSteps][2];

  __device__ __forceinline__ Queries(const SplitKFlashAttnArgs& args, int slot, int head) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const float2* const rotations = rotations_of(args, slot);
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      const int of = min(8 * tile + lane / 4, args.group - 1);  // behind the last: never stored
      const Element* const q =
          args.q + slot * args.stride + (static_cast<int64_t>(head) * args.group + of) * HEAD_DIM;
#pragma unroll
      for (int chunk = 0; chunk < kChunks / 2; chunk++) {
        const int dim = 8 * chunk + 2 * t;
        const Pair low = *reinterpret_cast<const Pair*>(q + dim);
        const Pair high = *reinterpret_cast<const Pair*>(q + dim + HEAD_DIM / 2);
        float2 first = {to_float(low.first), to_float(low.second)};
        float2 second = {to_float(high.first), to_float(high.second)};
        if (rotations) {
          rotate(rotations, dim, first.x, second.x);
          rotate(rotations, dim + 1, first.y, second.y);
        }
        const int partner = chunk + kChunks / 2;
        step[tile][chunk / 2][chunk % 2] = packed(first.x, first.y);
        step[tile][partner / 2][partner % 2] = packed(second.x, second.y);
      }
    }
  }
};

// Adds 16 positions of a block at `keys` in shared memory, of which the first `valid` count.
__device__ __forceinline__ void attend(uint32_t keys, int valid, float scale,
                                       const Queries& queries, State& state) {
  const int lane = threadIdx.x % 32;
  // Lanes of ldmatrix: keys go by position, then by the next 8 dimensions, values the other way.
  const uint32_t k = keys + lane % 16 * 16 + lane / 16 * kChunkBytes;
  const uint32_t v =
      keys + kHalfBytes + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * kChunkBytes;
  float2 low[GROUP_TILES] = {}, high[GROUP_TILES] = {};  // scores of positions g and g + 8
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, k + 2 * s * kChunkBytes);
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      ptx::mma(low[tile], high[tile], a, queries.step[tile][s][0], queries.step[tile][s][1],
               Element());
    }
  }
  uint32_t p[GROUP_TILES][2];
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; tile++) {
    float2 &most = state.most[tile], &above = low[tile], &below = high[tile];
    above = lane / 4 < valid ? float2{above.x * scale, above.y * scale} : float2{kNone, kNone};
    below = lane / 4 + 8 < valid ? float2{below.x * scale, below.y * scale} : float2{kNone, kNone};
    const float2 now = {fmaxf(most.x, over_rows(fmaxf(above.x, below.x), true)),
                        fmaxf(most.y, over_rows(fmaxf(above.y, below.y), true))};
    const float2 kept = {exp2f(most.x - now.x), exp2f(most.y - now.y)};
    most = now;
    above = {exp2f(above.x - now.x), exp2f(above.y - now.y)};
    below = {exp2f(below.x - now.x), exp2f(below.y - now.y)};
    state.sum[tile].x = state.sum[tile].x * kept.x + above.x + below.x;
    state.sum[tile].y = state.sum[tile].y * kept.y + above.y + below.y;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      float2 &first = state.low[tile][s], &second = state.high[tile][s];
      first = {first.x * kept.x, first.y * kept.y};
      second = {second.x * kept.x, second.y * kept.y};
    }
    p[tile][0] = ptx::movmatrix_trans(packed(above.x, above.y));
    p[tile][1] = ptx::movmatrix_trans(packed(below.x, below.y));
  }
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    uint32_t a[4];
    ptx::ldmatrix_x4_trans(a, v + 2 * s * kChunkBytes);
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      ptx::mma(state.low[tile][s], state.high[tile][s], a, p[tile][0], p[tile][1], Element());
    }
  }
}

// The new token's keys and values into row `row` of a warp's 16 rows of a stage, and zeros into the
// values behind it: a weight of zero times what happens to lie there need not be zero.
__device__ __forceinline__ void patch(const SplitKFlashAttnArgs& args, const Items& items,
                                      uint8_t* rows, int row) {
  const int lane = threadIdx.x % 32, position = args.lengths[items.slot];
  const int64_t at = items.slot * args.stride + static_cast<int64_t>(items.head) * HEAD_DIM;
  const float2* const rotations = rotations_of(args, items.slot);
  uint8_t* const block = items.block(items.block_count() - 1) + position % kBlock * 16;
  auto put = [&](int dim, float key) {
    const int offset = dim / 8 * kChunkBytes + dim % 8 * 2;
    Element rounded;
    convert(rounded, key);
    uint8_t* const both[] = {rows + row * 16 + offset, block + offset};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      *reinterpret_cast<Element*>(both[i]) = rounded;
      *reinterpret_cast<Element*>(both[i] + kHalfBytes) = args.v[at + dim];
    }
  };
#pragma unroll 1
  for (int dim = lane; dim < HEAD_DIM / 2; dim += 32) {
    float first = to_float(args.k[at + dim]), second = to_float(args.k[at + dim + HEAD_DIM / 2]);
    if (rotations) rotate(rotations, dim, first, second);
    put(dim, first);
    put(dim + HEAD_DIM / 2, second);
  }
  if (lane < kChunks) {
    auto* const values = reinterpret_cast<float4*>(rows + kHalfBytes + lane * kChunkBytes);
    for (int behind = row + 1; behind < kWarpRows; behind++) {
      values[behind] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void consume(const SplitKFlashAttnArgs& args, const Ring& ring,
                                        Items items) {
  const int warp = threadIdx.x / 32;
  const Merge merge(smem + ring.stages * kBlockBytes);
  RingPosition at;
  for (; !items.done(); items.next()) {
    const Queries queries(args, items.slot, items.head);
    State state;
    const int end = args.lengths[items.slot] + 1 - items.first_block() * kBlock;
    const int count = items.block_count();
    for (int i = 0; i < count; i++) {
      wait_barrier(ring.full_barrier[at.stage], at.parity);
      // Of the warp's 16 positions these are before the end, the new token's among them.
      const int valid = end - i * kBlock - warp * kWarpRows;
      const uint32_t offset = at.stage * kBlockBytes + warp * kWarpRows * 16;
      if (valid > 0) {
        const bool has_new = valid <= kWarpRows;
        if (has_new) patch(args, items, smem + offset, valid - 1);
        attend(ring.first + offset, valid, args.scale, queries, state);
        if (has_new) ptx::fence_proxy_async();  // before the next copy into the stage
      }
      ptx::mbarrier_arrive(ring.empty_barrier[at.stage]);
      at.advance(ring.stages);
    }
    merge.finish(args, items, state);
  }
}

// Two CTAs to an SM, that of this op and that of the next; elsewhere the largest states would
// spill.
#if GROUP_TILES == 2 && HEAD_DIM == 128 && __CUDA_ARCH__ != 900
constexpr int kCtasOfSm = 1;
#else
constexpr int kCtasOfSm = 2;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtasOfSm)
    splitk_flash_attn(const __grid_constant__ SplitKFlashAttnArgs args) {
  __shared__ uint64_t barriers[2 * kMaxStages];
  const Ring ring(args, barriers);
  if (threadIdx.x == kConsumers) ring.initialize();
  int tier = 0;
  while (tier + 1 < args.tier_count && blockIdx.x >= args.tiers[tier + 1].first_cta)
    tier++;
  const Items items(args, tier);
  __syncthreads();
  ptx::launch_dependents();
  if (threadIdx.x == kConsumers) produce(args, ring, items, args.tiers[tier].window);
  // Every thread waits, also those that read nothing: that this kernel is complete then implies
  // that those before it are, at any distance.
  ptx::wait_for_dependencies();
  if (threadIdx.x < kConsumers) consume(args, ring, items);
}
