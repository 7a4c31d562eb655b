// Decode attention: a new token of every slot attends to the slot's cached keys and values, which
// lie in several memory tiers, and to its own, which are appended to the cache.
//
// A slot's cache is [KV heads][blocks of 64 positions][keys, values], each [HEAD_DIM / 8][64][8]
// elements: any 8 x 8 elements that a matrix load asks for are 128 bytes in a row. Keys and values
// of blocks, one copy each, go through a ring of stages. A block is one warp's, which keeps a
// softmax (Milakov, Gimelshein 2018; FlashAttention-2, arXiv 2307.08691) for all query heads of a
// KV head at once: keys and values are the A operands, queries and probabilities the B operands, so
// that the tensor cores read them once for a group.
//
// What a warp computes, an item, is a chunk of blocks of one KV head of one slot; the warps of a
// CTA are at different items, so that one's loads and stores hide behind the others' work. Chunks
// depend on what a cache has room for, and their results are added up in order, so neither tiers
// nor batches nor CTAs change a bit. A tier's CTAs share its items so that each reads as many
// blocks.

#include "attention_merge.cuh"
#include "splitk_flash_attn.cuh"

constexpr int kDepth = 2;  // blocks that a warp may have before it: windows are 4 copies at most

struct Shared {
  uint64_t k_barriers[kWarps][kDepth];  // a block's keys have landed
  uint64_t v_barriers[kWarps][kDepth];  // and its values
  uint64_t empty_barriers[kMaxStages];  // the warp is done with the stage
  Task tasks[kWarps][kDepth];
  uint32_t landing[kMaxStages];  // of a copy into a stage: barrier, plus the parity of its phase
};

struct Ring {
  Shared& shared;
  Barriers k_barrier, v_barrier, empty_barrier;
  uint32_t first;
  int stages;

  __device__ __forceinline__ Ring(const SplitKFlashAttnArgs& args, Shared& shared)
      : shared(shared),
        k_barrier{in_register(ptx::smem_address(shared.k_barriers))},
        v_barrier{in_register(ptx::smem_address(shared.v_barriers))},
        empty_barrier{in_register(ptx::smem_address(shared.empty_barriers))},
        first(in_register(ptx::smem_address(smem))),
        stages(args.stages) {}

  __device__ __forceinline__ void initialize() const {
#pragma unroll
    for (int i = 0; i < kWarps * kDepth; i++) {
      ptx::mbarrier_init(k_barrier[i], 1);
      ptx::mbarrier_init(v_barrier[i], 1);
    }
#pragma unroll
    for (int i = 0; i < kMaxStages; i++)
      ptx::mbarrier_init(empty_barrier[i], 1);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t stage(int number) const {
    return first + number * kHalfBytes;
  }
};

// Blocks of items on their way to warps, item by item in turns. Lane w has what warp w is to get.
// Cached blocks do not depend on the kernels before: what the new token adds to the last block of a
// slot does not come from the cache.
struct Producer {
  const Ring& ring;
  const int window;
  Task task;                  // of the lane's warp: its next block
  const uint8_t* from;        // where it lies
  int given = 0;              // blocks so far
  RingPosition last[kDepth];  // stages of the values of the latest of them
  int last_issued[kDepth];    // copies before those
  RingPosition fill;          // of all warps: the next stage
  int issued = 0;             // copies

  __device__ __forceinline__ Producer(const Ring& ring, int window) : ring(ring), window(window) {
    task.count = 0;
  }

  // All lanes.
  __device__ __forceinline__ void run(Items items) {
    const int lane = threadIdx.x % 32;
    for (bool more = true; more;) {
      more = false;
#pragma unroll 1
      for (int warp = 0; warp < kWarps; warp++) {
        if (__shfl_sync(0xffffffff, task.count, warp) == 0) {
          if (items.done()) continue;
          if (lane == warp) {
            task = {items.slot, items.head, items.chunk, 0, items.block_count()};
            from = items.address();
          }
          items.next();
        }
        more = true;
        if (lane == warp) give(warp);
        __syncwarp();
        issued += 2;
        fill.advance(ring.stages);
        fill.advance(ring.stages);
      }
    }
    if (lane < kWarps) {
      task.slot = -1;
      post(lane);
      ptx::mbarrier_arrive(ring.k_barrier[lane * kDepth + given % kDepth]);
    }
  }

 private:
  // Waits until the warp is done with the block of `kDepth` before, and tells it of the next.
  __device__ __forceinline__ void post(int warp) {
    // Where its stage was filled anew, that was waited for already.
    if (given >= kDepth && last_issued[given % kDepth] + ring.stages >= issued) {
      const RingPosition& values = last[given % kDepth];
      wait_barrier(ring.empty_barrier[values.stage], values.parity);
    }
    ring.shared.tasks[warp][given % kDepth] = task;
  }

  __device__ __forceinline__ void give(int warp) {
    RingPosition keys = fill, values = fill;
    values.advance(ring.stages);
    task.k_stage = keys.stage, task.v_stage = values.stage;
    post(warp);
    const int number = warp * kDepth + given % kDepth;
    const uint32_t parity = given / kDepth % 2;
    load(keys, from, ring.k_barrier[number], parity, issued);
    load(values, from + kHalfBytes, ring.v_barrier[number], parity, issued + 1);
    last[given % kDepth] = values, last_issued[given % kDepth] = issued + 1;
    given++;
    from += 2 * kHalfBytes;
    if (++task.number == task.count) task.count = 0;
  }

  __device__ __forceinline__ void load(const RingPosition& to, const uint8_t* source,
                                       uint32_t barrier, uint32_t parity, int number) {
    if (window < ring.stages) {
      if (number >= window) {
        const int before = (to.stage + ring.stages - window) % ring.stages;
        const uint32_t landing = ring.shared.landing[before];
        wait_barrier(landing & ~1u, landing & 1);
      }
      ring.shared.landing[to.stage] = barrier + parity;
    }
    if (number >= ring.stages) wait_barrier(ring.empty_barrier[to.stage], to.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(barrier, kHalfBytes);
    ptx::bulk_load(ring.stage(to.stage), source, kHalfBytes, barrier);
  }
};

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

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, int slot, int head) {
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

// Scores of a block's keys, of which the first `valid` count: of tile 16 i, + 8 in high.
struct Scores {
  float2 low[kTiles][GROUP_TILES] = {}, high[kTiles][GROUP_TILES] = {};
};

__device__ __forceinline__ void multiply_keys(uint32_t keys, const Queries& queries,
                                              Scores& scores) {
  // Lanes of ldmatrix go by position, then by the next 8 dimensions.
  const int lane = threadIdx.x % 32;
  const uint32_t k = keys + lane % 16 * 16 + lane / 16 * kChunkBytes;
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, k + 2 * s * kChunkBytes + i * kTileRows * 16);
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; tile++) {
        ptx::mma(scores.low[i][tile], scores.high[i][tile], a, queries.step[tile][s][0],
                 queries.step[tile][s][1], Element());
      }
    }
  }
}

// Probabilities as B operand, up to a factor, and the state brought to what they count by.
struct Weights {
  uint32_t pair[kTiles][GROUP_TILES][2];

  __device__ __forceinline__ Weights(Scores& scores, int valid, float scale, State& state) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      float2 most = state.most[tile];
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        float2 &low = scores.low[i][tile], &high = scores.high[i][tile];
        const int at = kTileRows * i + row;
        low = at < valid ? float2{low.x * scale, low.y * scale} : float2{kNone, kNone};
        high = at + 8 < valid ? float2{high.x * scale, high.y * scale} : float2{kNone, kNone};
        most = {fmaxf(most.x, fmaxf(low.x, high.x)), fmaxf(most.y, fmaxf(low.y, high.y))};
      }
      most = {over_rows(most.x, true), over_rows(most.y, true)};
      const float2 kept = {exp2f(state.most[tile].x - most.x), exp2f(state.most[tile].y - most.y)};
      float2 sum = {state.sum[tile].x * kept.x, state.sum[tile].y * kept.y};
      state.most[tile] = most;
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const float2 low = scores.low[i][tile], high = scores.high[i][tile];
        const float2 above = {exp2f(low.x - most.x), exp2f(low.y - most.y)};
        const float2 below = {exp2f(high.x - most.x), exp2f(high.y - most.y)};
        sum = {sum.x + above.x + below.x, sum.y + above.y + below.y};
        pair[i][tile][0] = ptx::movmatrix_trans(packed(above.x, above.y));
        pair[i][tile][1] = ptx::movmatrix_trans(packed(below.x, below.y));
      }
      state.sum[tile] = sum;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        float2 &first = state.low[tile][s], &second = state.high[tile][s];
        first = {first.x * kept.x, first.y * kept.y};
        second = {second.x * kept.x, second.y * kept.y};
      }
    }
  }
};

// Values of tiles of positions that all lie behind the first `valid` are not read.
__device__ __forceinline__ void multiply_values(uint32_t values, int valid, const Weights& weights,
                                                State& state) {
  // Lanes of ldmatrix go by dimension, then by the next 8 positions.
  const int lane = threadIdx.x % 32;
  const uint32_t v = values + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * kChunkBytes;
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    if (i * kTileRows >= valid) break;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      uint32_t a[4];
      ptx::ldmatrix_x4_trans(a, v + 2 * s * kChunkBytes + i * kTileRows * 16);
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; tile++) {
        ptx::mma(state.low[tile][s], state.high[tile][s], a, weights.pair[i][tile][0],
                 weights.pair[i][tile][1], Element());
      }
    }
  }
}

// The new token of a slot, which is the last of the last block of each of its heads.
struct NewToken {
  const SplitKFlashAttnArgs& args;
  const Task& task;
  const int64_t at;  // of its keys and values in the operands
  uint8_t* cached;   // its first key in the cache
  const int row;     // of the block

  __device__ __forceinline__ NewToken(const SplitKFlashAttnArgs& args, const Task& task)
      : args(args),
        task(task),
        at(task.slot * args.stride + static_cast<int64_t>(task.head) * HEAD_DIM),
        row(args.lengths[task.slot] % kBlock) {
    const int block = args.lengths[task.slot] / kBlock;
    const int64_t number = static_cast<int64_t>(task.head) * args.slot_blocks + block;
    cached =
        reinterpret_cast<uint8_t*>(args.caches[task.slot]) + number * 2 * kHalfBytes + row * 16;
  }

  // Its keys into the stage and the cache.
  __device__ __forceinline__ void put_keys(uint8_t* keys) const {
    const float2* const rotations = rotations_of(args, task.slot);
#pragma unroll 1
    for (int dim = threadIdx.x % 32; dim < HEAD_DIM / 2; dim += 32) {
      float first = to_float(args.k[at + dim]), second = to_float(args.k[at + dim + HEAD_DIM / 2]);
      if (rotations) rotate(rotations, dim, first, second);
      Element rounded[2];
      convert(rounded[0], first), convert(rounded[1], second);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        *element(keys + row * 16, dim + i * HEAD_DIM / 2) = rounded[i];
        *element(cached, dim + i * HEAD_DIM / 2) = rounded[i];
      }
    }
    __syncwarp();
  }

  // Its values, and zeros behind them in their tile: a weight of zero times what happens to lie
  // there need not be zero.
  __device__ __forceinline__ void put_values(uint8_t* values) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int dim = lane; dim < HEAD_DIM; dim += 32) {
      const Element value = args.v[at + dim];
      *element(values + row * 16, dim) = value;
      *element(cached + kHalfBytes, dim) = value;
    }
    if (lane < kChunks) {
      auto* const rows = reinterpret_cast<float4*>(values + lane * kChunkBytes);
      for (int behind = row + 1; behind % kTileRows; behind++)
        rows[behind] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static Element* element(uint8_t* position, int dim) {
    return reinterpret_cast<Element*>(position + dim / 8 * kChunkBytes) + dim % 8;
  }
};

__device__ __forceinline__ void consume(const SplitKFlashAttnArgs& args, const Ring& ring) {
  const int warp = threadIdx.x / 32;
  const bool arrives = threadIdx.x % 32 == 0;
  State state;
  Queries queries;
  int length = 0;  // of the item's slot, with the new token
#pragma unroll 1
  for (int taken = 0;; taken++) {
    const int number = warp * kDepth + taken % kDepth;
    const uint32_t parity = taken / kDepth % 2;
    wait_barrier(ring.k_barrier[number], parity);
    const Task task = ring.shared.tasks[warp][taken % kDepth];
    if (task.slot < 0) break;
    if (task.number == 0) {
      queries.load(args, task.slot, task.head);
      state.reset();
      length = args.lengths[task.slot] + 1;
    }
    const int valid = length - (task.chunk * args.chunk_blocks + task.number) * kBlock;
    const bool has_new = valid <= kBlock;
    if (has_new) NewToken(args, task).put_keys(smem + task.k_stage * kHalfBytes);
    Scores scores;
    multiply_keys(ring.stage(task.k_stage), queries, scores);
    if (has_new) ptx::fence_proxy_async();  // before the next copy into the stage
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.k_stage]);
    const Weights weights(scores, valid, args.scale, state);
    wait_barrier(ring.v_barrier[number], parity);
    if (has_new) NewToken(args, task).put_values(smem + task.v_stage * kHalfBytes);
    multiply_values(ring.stage(task.v_stage), valid, weights, state);
    if (has_new) ptx::fence_proxy_async();
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.v_stage]);
    if (task.number + 1 == task.count) finish(args, task, state);
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
  __shared__ Shared shared;
  ptx::launch_dependents();
  const Ring ring(args, shared);
  const bool copies = threadIdx.x / 32 == kWarps;
  if (threadIdx.x == 32 * kWarps) ring.initialize();
  __syncthreads();
  if (copies) {
    int tier = 0;
    while (tier + 1 < args.tier_count && blockIdx.x >= args.tiers[tier + 1].first_cta)
      tier++;
    Producer(ring, args.tiers[tier].window).run(Items(args, tier));
  }
  // Every thread waits, also those that read nothing: that this kernel is complete then implies
  // that those before it are, at any distance.
  ptx::wait_for_dependencies();
  if (!copies) consume(args, ring);
}
