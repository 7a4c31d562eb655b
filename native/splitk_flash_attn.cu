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
  uint64_t task_barriers[kWarps * kDepth];  // what a block is is known, its copies are under way
  uint64_t k_barriers[kWarps * kDepth];     // a block's keys have landed
  uint64_t v_barriers[kWarps * kDepth];     // and its values
  uint64_t empty_barriers[kMaxStages];      // the warp is done with the stage
  Task tasks[kWarps * kDepth];
  uint32_t landing[kMaxStages];  // of a copy into a stage: barrier, plus the parity of its phase
};

struct Ring {
  Shared& shared;
  Barriers task_barrier, k_barrier, v_barrier, empty_barrier;
  uint32_t first;
  int stages;

  __device__ __forceinline__ Ring(const SplitKFlashAttnArgs& args, Shared& shared)
      : shared(shared),
        task_barrier{in_register(ptx::smem_address(shared.task_barriers))},
        k_barrier{task_barrier[kWarps * kDepth]},
        v_barrier{task_barrier[2 * kWarps * kDepth]},
        empty_barrier{task_barrier[3 * kWarps * kDepth]},
        first(in_register(ptx::smem_address(smem))),
        stages(args.stages) {}

  __device__ __forceinline__ void initialize() const {
#pragma unroll
    for (int i = 0; i < kWarps * kDepth; i++) {
      ptx::mbarrier_init(task_barrier[i], 1);
      ptx::mbarrier_init(k_barrier[i], 1);
      ptx::mbarrier_init(v_barrier[i], 1);
    }
#pragma unroll
    for (int i = 0; i < kMaxStages; i++)
      ptx::mbarrier_init(empty_barrier[i], kArrivalsOfWarp);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t stage(int number) const {
    return first + number * kHalfBytes;
  }
};

// The values of a block: the copies that were issued before, and where they went.
struct Given {
  int issued = 0;
  RingPosition at;
};

// Blocks of items on their way to warps, item by item in turns. Lane w has what warp w is to get.
// Cached blocks do not depend on the kernels before: what the new token adds to the last block of a
// slot does not come from the cache.
struct Producer {
  const Ring& ring;
  const int window;
  int slot, head, chunk, number, count = 0;  // the lane's item, and the next of its blocks
  const uint8_t* from;                       // where that lies
  int given = 0;                             // blocks so far
  Given last, before_last;                   // of those
  RingPosition fill;                         // of all warps: the next stage
  int issued = 0;                            // copies

  __device__ __forceinline__ Producer(const Ring& ring, int window) : ring(ring), window(window) {}

  // All lanes.
  __device__ __forceinline__ void run(Items items) {
    const int lane = threadIdx.x % 32;
    for (bool more = true; more;) {
      more = false;
#pragma unroll 1
      for (int warp = 0; warp < kWarps; warp++) {
        if (__shfl_sync(0xffffffff, count, warp) == 0) {
          if (items.done()) continue;
          if (lane == warp) {
            slot = items.slot, head = items.head, chunk = items.chunk;
            number = 0, count = items.block_count(), from = items.address();
          }
          items.next();
        }
        more = true;
        RingPosition values = fill;
        values.advance(ring.stages);
        if (lane == warp) give(values);
        __syncwarp();
        issued += 2;
        fill = values;
        fill.advance(ring.stages);
      }
    }
    slot = -1;
    if (lane < kWarps) post(fill);
  }

 private:
  // Tells the warp of the next block, once it is done with that of kDepth before.
  __device__ __forceinline__ void post(const RingPosition& values) {
    // Where a stage was filled anew, that was waited for already.
    if (given >= kDepth && before_last.issued + ring.stages >= issued) {
      wait_barrier(ring.empty_barrier[before_last.at.stage], before_last.at.parity);
    }
    const int place = threadIdx.x % 32 * kDepth + given % kDepth;
    ring.shared.tasks[place] = {slot, head, chunk, number, count, fill.stage, values.stage};
    ptx::mbarrier_arrive(ring.task_barrier[place]);
  }

  __device__ __forceinline__ void give(const RingPosition& values) {
    post(values);
    const int place = threadIdx.x % 32 * kDepth + given % kDepth;
    const uint32_t parity = given / kDepth % 2;
    load(fill, from, ring.k_barrier[place], parity, issued);
    load(values, from + kHalfBytes, ring.v_barrier[place], parity, issued + 1);
    before_last = last;
    last.issued = issued + 1, last.at = values;
    given++;
    from += 2 * kHalfBytes;
    if (++number == count) count = 0;
  }

  __device__ __forceinline__ void load(const RingPosition& to, const uint8_t* source,
                                       uint32_t barrier, uint32_t parity, int copy) {
    if (window < ring.stages) {
      if (copy >= window) {
        const int before = to.stage - window;
        const uint32_t landing = ring.shared.landing[before < 0 ? before + ring.stages : before];
        wait_barrier(landing & ~1u, landing & 1);
      }
      ring.shared.landing[to.stage] = barrier + parity;
    }
    if (copy >= ring.stages) wait_barrier(ring.empty_barrier[to.stage], to.parity ^ 1);
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

// The new token of a slot, which is the last of the last block of each of its heads. A lane has
// some of its dimensions, keys by the two that are rotated together.
struct NewToken {
  static constexpr int kPairs = (HEAD_DIM / 2 + 31) / 32, kValues = (HEAD_DIM + 31) / 32;

  uint8_t* cached;        // its first key in the cache
  int row;                // of the block
  uint32_t keys[kPairs];  // both
  Element values[kValues];

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, const Task& task) {
    const int position = args.lengths[task.slot];
    const int64_t number = static_cast<int64_t>(task.head) * args.slot_blocks + position / kBlock;
    row = position % kBlock;
    cached =
        reinterpret_cast<uint8_t*>(args.caches[task.slot]) + number * 2 * kHalfBytes + row * 16;
    const int64_t at = task.slot * args.stride + static_cast<int64_t>(task.head) * HEAD_DIM;
    const float2* const rotations = rotations_of(args, task.slot);
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const int dim = min(dimension(i), HEAD_DIM / 2 - 1);
      float first = to_float(args.k[at + dim]), second = to_float(args.k[at + dim + HEAD_DIM / 2]);
      if (rotations) rotate(rotations, dim, first, second);
      keys[i] = packed(first, second);
    }
#pragma unroll
    for (int i = 0; i < kValues; i++)
      values[i] = args.v[at + min(dimension(i), HEAD_DIM - 1)];
  }

  // Its keys into the stage and the cache.
  __device__ __forceinline__ void put_keys(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const Pair pair = *reinterpret_cast<const Pair*>(&keys[i]);
      const int dim = dimension(i);
      if (dim >= HEAD_DIM / 2) continue;
      put(stage, cached, dim, pair.first);
      put(stage, cached, dim + HEAD_DIM / 2, pair.second);
    }
    __syncwarp();
  }

  // Its values, and zeros behind them in their tile: a weight of zero times what happens to lie
  // there need not be zero.
  __device__ __forceinline__ void put_values(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kValues; i++) {
      if (dimension(i) < HEAD_DIM) put(stage, cached + kHalfBytes, dimension(i), values[i]);
    }
    const int lane = threadIdx.x % 32;
    if (lane < kChunks) {
      auto* const rows = reinterpret_cast<float4*>(stage + lane * kChunkBytes);
      for (int behind = row + 1; behind % kTileRows; behind++)
        rows[behind] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static int dimension(int number) {
    return threadIdx.x % 32 + 32 * number;
  }
  __device__ __forceinline__ void put(uint8_t* stage, uint8_t* position, int dim,
                                      Element value) const {
    const int offset = dim / 8 * kChunkBytes + dim % 8 * 2;
    *reinterpret_cast<Element*>(stage + row * 16 + offset) = value;
    *reinterpret_cast<Element*>(position + offset) = value;
  }
};

__device__ __forceinline__ void consume(const SplitKFlashAttnArgs& args, const Ring& ring) {
  const int warp = threadIdx.x / 32;
  const bool arrives = arrives_for_warp();
  State state;
  state.reset();
  Queries queries = {};
  int length = 0;  // of the item's slot, with the new token
#pragma unroll 1
  for (int taken = 0;; taken++) {
    const int number = warp * kDepth + taken % kDepth;
    const uint32_t parity = taken / kDepth % 2;
    wait_barrier(ring.task_barrier[number], parity);
    const Task task = ring.shared.tasks[number];
    if (task.slot < 0) break;
    if (task.number == 0) {
      queries.load(args, task.slot, task.head);
      length = args.lengths[task.slot] + 1;
    }
    const int valid = length - (task.chunk * args.chunk_blocks + task.number) * kBlock;
    const bool has_new = valid <= kBlock;
    NewToken token;
    if (has_new) token.load(args, task);
    wait_barrier(ring.k_barrier[number], parity);
    if (has_new) token.put_keys(smem + task.k_stage * kHalfBytes);
    Scores scores;
    multiply_keys(ring.stage(task.k_stage), queries, scores);
    if (has_new) ptx::fence_proxy_async();  // before the next copy into the stage
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.k_stage]);
    const Weights weights(scores, valid, args.scale, state);
    wait_barrier(ring.v_barrier[number], parity);
    if (has_new) token.put_values(smem + task.v_stage * kHalfBytes);
    multiply_values(ring.stage(task.v_stage), valid, weights, state);
    if (has_new) ptx::fence_proxy_async();
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.v_stage]);
    if (task.number + 1 < task.count) continue;
    finish(args, task, length, state);
    state.reset(), queries = {};  // which the compiler sees need not be kept meanwhile
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
