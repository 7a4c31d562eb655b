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

#include "common.cuh"
#include "element.cuh"

constexpr int kMaxTiers = 9;
constexpr int kMaxStages = 16;
constexpr int kWarps = 4;
constexpr int kConsumers = 32 * kWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kBlock = 64;                  // positions
constexpr int kWarpRows = kBlock / kWarps;  // 16, the height of an mma
constexpr int kChunkBytes = kBlock * 16;    // 8 dimensions of a block's keys or values
constexpr int kChunks = HEAD_DIM / 8;
constexpr int kHalfBytes = kChunks * kChunkBytes;  // keys, or values, of a block
constexpr int kBlockBytes = 2 * kHalfBytes;
constexpr int kSteps = HEAD_DIM / 16;

// One cubin per dtype, head size and size of the groups: BFLOAT16, HEAD_DIM, GROUP_TILES.
constexpr int kMergeHeads = 4;   // whose sums the warps bring together at a time
constexpr float kNone = -1e30f;  // less than any score, and no infinity: less itself it is zero

extern __shared__ __align__(1024) uint8_t smem[];

struct Tier {
  int first_slot;  // slots are ordered by tiers
  int first_cta;
  int window;  // stages that a CTA may have in flight
};

struct SplitKFlashAttnArgs {
  Tier tiers[kMaxTiers + 1];  // one more, for the ends
  const uint64_t* caches;     // [slots]: the address of each slot's cache
  const int* lengths;  // [slots]: positions cached before the new one; negative: an empty slot
  const Element* q;    // [slots][kv_heads * group][HEAD_DIM], rows `stride` apart
  const Element* k;    // [slots][kv_heads][HEAD_DIM], likewise: the new token's
  const Element* v;
  const float2* rotations;  // [positions][HEAD_DIM / 2] (cos, sin), or null
  Element* out;             // [slots][kv_heads * group][HEAD_DIM]
  float* partials;          // [slots][kv_heads][max_chunks][group][HEAD_DIM + 2]
  int* arrivals;            // [slots][kv_heads]: zero before and after
  int64_t stride;
  int tier_count, kv_heads, group;
  int slot_blocks;   // that a cache has room for, of each KV head
  int chunk_blocks;  // of an item
  int max_chunks;
  int stages;
  float scale;  // of the scores, times log2(e)
};

__device__ __forceinline__ int blocks_of(const SplitKFlashAttnArgs& args, int slot) {
  const int length = args.lengths[slot];
  return length < 0 ? 0 : length / kBlock + 1;
}

// The items of a CTA, one after the other: chunk by chunk, head by head, slot by slot.
struct Items {
  const SplitKFlashAttnArgs& args;
  int slot, head = 0, chunk = 0, blocks = 0;  // of the slot
  int64_t left;                               // blocks up to where the next CTA's items start

  // All lanes of a warp. An item is the CTA's in whose even share of the tier's blocks it starts.
  __device__ __forceinline__ Items(const SplitKFlashAttnArgs& args, int number)
      : args(args), slot(args.tiers[number].first_slot) {
    const Tier &tier = args.tiers[number], &next = args.tiers[number + 1];
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int first = tier.first_slot; first < next.first_slot; first += 32) {
      total += first + lane < next.first_slot ? blocks_of(args, first + lane) : 0;
    }
#pragma unroll
    for (int far = 1; far < 32; far *= 2)
      total += __shfl_xor_sync(0xffffffff, total, far);
    const int64_t all = static_cast<int64_t>(total) * args.kv_heads;
    const int ctas = next.first_cta - tier.first_cta;
    const int cta = static_cast<int>(blockIdx.x) - tier.first_cta;
    int64_t start = all * cta / ctas;
    left = all * (cta + 1) / ctas - start;
    // The first slot that ends behind `start`, 32 slots at a time.
    while (slot < next.first_slot) {
      int sum = slot + lane < next.first_slot ? blocks_of(args, slot + lane) : 0;
#pragma unroll
      for (int far = 1; far < 32; far *= 2) {
        const int before = __shfl_sync(0xffffffff, sum, lane < far ? lane : lane - far);
        if (lane >= far) sum += before;
      }
      int behind = 0;  // slots of these that end at `start` or before
      int64_t passed = 0;
#pragma unroll 1
      for (int other = 0; other < 32; other++) {
        const int64_t ends =
            static_cast<int64_t>(__shfl_sync(0xffffffff, sum, other)) * args.kv_heads;
        if (ends <= start) behind = other + 1, passed = ends;
      }
      slot += behind;
      start -= passed;
      if (behind < 32) break;
    }
    if (slot >= next.first_slot) {
      left = 0;
      return;
    }
    blocks = blocks_of(args, slot);
    if (blocks == 0) {
      left = 0;
      return;
    }
    head = static_cast<int>(start / blocks);
    const int within = static_cast<int>(start % blocks);
    chunk = (within + args.chunk_blocks - 1) / args.chunk_blocks;
    left -= min(chunk * args.chunk_blocks, blocks) - within;
    settle();
  }

  __device__ __forceinline__ bool done() const { return left <= 0; }
  __device__ __forceinline__ int first_block() const { return chunk * args.chunk_blocks; }
  __device__ __forceinline__ int block_count() const {
    return min(args.chunk_blocks, blocks - first_block());
  }
  __device__ __forceinline__ int chunk_count() const {
    return (blocks + args.chunk_blocks - 1) / args.chunk_blocks;
  }
  __device__ __forceinline__ uint8_t* block(int number) const {
    const int64_t at = static_cast<int64_t>(head) * args.slot_blocks + first_block() + number;
    return reinterpret_cast<uint8_t*>(args.caches[slot]) + at * kBlockBytes;
  }
  __device__ __forceinline__ void next() {
    left -= block_count();
    chunk++;
    settle();
  }

 private:
  // On to the next head or slot where this one has no more chunks; `left` bounds the slots.
  __device__ __forceinline__ void settle() {
    while (left > 0 && first_block() >= blocks) {
      chunk = 0;
      if (++head < args.kv_heads) continue;
      head = 0;
      blocks = blocks_of(args, ++slot);
      while (blocks == 0)
        blocks = blocks_of(args, ++slot);
    }
  }
};

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

// A warp's softmax and weighted values over the positions that it has seen. Lane 4g + t has query
// heads 2t and 2t + 1 of each tile: of the sums of weights its own rows' part, and of the outputs
// dimensions 16 s + g (low) and + 8 (high).
struct State {
  float2 most[GROUP_TILES], sum[GROUP_TILES];
  float2 low[GROUP_TILES][kSteps] = {}, high[GROUP_TILES][kSteps] = {};

  __device__ __forceinline__ State() {
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      most[tile] = {kNone, kNone};
      sum[tile] = {0.0f, 0.0f};
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

// Brings the warps' states of an item together, some heads at a time, and stores what comes of it.
struct Merge {
  float* const values;   // [warps][kMergeHeads][HEAD_DIM] in shared memory
  float2* const totals;  // [warps][kMergeHeads]: largest score, sum of weights
  int* const last;       // whether the item is the last of its head to be done

  __device__ __forceinline__ explicit Merge(uint8_t* memory)
      : values(reinterpret_cast<float*>(memory)),
        totals(reinterpret_cast<float2*>(values + kWarps * kMergeHeads * HEAD_DIM)),
        last(reinterpret_cast<int*>(totals + kWarps * kMergeHeads)) {}

  __device__ __forceinline__ void finish(const SplitKFlashAttnArgs& args, const Items& items,
                                         const State& state) const {
    const int row = items.slot * args.kv_heads + items.head, chunks = items.chunk_count();
    const int64_t size = static_cast<int64_t>(args.group) * (HEAD_DIM + 2);
    float* const partials = args.partials + row * args.max_chunks * size;
    for (int first = 0; first < args.group; first += kMergeHeads) {
      const int heads = min(kMergeHeads, args.group - first);
      publish(first, heads, state);
      ptx::named_barrier_sync(1, kConsumers);
      for (int i = threadIdx.x; i < heads * HEAD_DIM; i += kConsumers) {
        const int head = i / HEAD_DIM, dim = i % HEAD_DIM;
        float most = kNone, sum = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; w++)
          most = fmaxf(most, totals[w * kMergeHeads + head].x);
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
          const float2 total = totals[w * kMergeHeads + head];
          const float weight = exp2f(total.x - most);
          sum += weight * total.y;
          value += weight * values[(w * kMergeHeads + head) * HEAD_DIM + dim];
        }
        if (chunks == 1) {
          store(args, row, first * HEAD_DIM + i, value / sum);
        } else {
          float* const to = partials + items.chunk * size + (first + head) * (HEAD_DIM + 2);
          to[dim] = value;
          if (dim == 0) to[HEAD_DIM] = most, to[HEAD_DIM + 1] = sum;
        }
      }
      ptx::named_barrier_sync(1, kConsumers);  // the scratch memory is free again
    }
    if (chunks > 1) combine(args, row, chunks, partials, size);
  }

 private:
  // A warp all of whose positions lie behind the end has seen nothing: its weight comes to zero.
  __device__ __forceinline__ void publish(int first, int heads, const State& state) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      const float2 sums = {over_rows(state.sum[tile].x, false),
                           over_rows(state.sum[tile].y, false)};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int head = 8 * tile + 2 * t + i - first;
        if (head < 0 || head >= heads) continue;
        const int number = warp * kMergeHeads + head;
        if (g == 0) {
          totals[number] = {i ? state.most[tile].y : state.most[tile].x, i ? sums.y : sums.x};
        }
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          float* const at = values + number * HEAD_DIM + 16 * s + g;
          at[0] = i ? state.low[tile][s].y : state.low[tile][s].x;
          at[8] = i ? state.high[tile][s].y : state.high[tile][s].x;
        }
      }
    }
  }

  // Output `i` of a KV head's group, all of them of `row`: slot times KV heads plus the KV head.
  __device__ __forceinline__ static void store(const SplitKFlashAttnArgs& args, int row, int i,
                                               float value) {
    convert(args.out[static_cast<int64_t>(row) * args.group * HEAD_DIM + i], value);
  }

  // Whoever is the last to have written a chunk's part adds up all of them, in order.
  __device__ __forceinline__ void combine(const SplitKFlashAttnArgs& args, int row, int chunks,
                                          const float* partials, int64_t size) const {
    __threadfence();  // the part before the arrival, at the scope of the GPU
    ptx::named_barrier_sync(1, kConsumers);
    if (threadIdx.x == 0) {
      *last = atomicAdd(args.arrivals + row, 1) == chunks - 1;
      if (*last) args.arrivals[row] = 0;
      __threadfence();  // the arrival before the other parts
    }
    ptx::named_barrier_sync(1, kConsumers);
    if (!*last) return;
    for (int i = threadIdx.x; i < args.group * HEAD_DIM; i += kConsumers) {
      const float* const head = partials + i / HEAD_DIM * (HEAD_DIM + 2);
      float most = kNone, sum = 0.0f, value = 0.0f;
      for (int chunk = 0; chunk < chunks; chunk++) {
        const volatile float* const part = head + chunk * size;
        const float now = fmaxf(most, part[HEAD_DIM]);
        const float kept = exp2f(most - now), weight = exp2f(part[HEAD_DIM] - now);
        sum = sum * kept + part[HEAD_DIM + 1] * weight;
        value = value * kept + part[i % HEAD_DIM] * weight;
        most = now;
      }
      store(args, row, i, value / sum);
    }
  }
};

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
