// SplitK_FlashAttn: sizes, kernel arguments, and the work items of a CTA.
//
// Compiled once per dtype (BFLOAT16), head size (HEAD_DIM) and tiles of 8 query heads a KV head
// (GROUP_TILES), each also with PREFIXES=1: attention to slots' leading blocks is computed before;
// with SPILLED=1: leading blocks of local slots may lie in the first remote tier; and with
// HEAD_NORMS=1: query and key heads are normalized (RMSNorm) before RoPE.
#pragma once

#include "common.cuh"
#include "element.cuh"
#include "geometry.cuh"

constexpr bool kPrefixes = PREFIXES, kSpilled = SPILLED, kHeadNorms = HEAD_NORMS;
constexpr int kMaxStages = ATTENTION_MAX_STAGES;
constexpr int kWarps = GROUP_TILES == 1 ? ATTENTION_WARPS : ATTENTION_WARPS_LARGE_GROUP;
constexpr int kThreads = 32 * (kWarps + 1);  // attention warps and the producer warp
constexpr int kBlock = KV_BLOCK;             // positions
constexpr int kTileRows = 16;                // positions, the M of an mma
constexpr int kTiles = kBlock / kTileRows;
constexpr int kVectors = HEAD_DIM / 8;          // of 16 bytes, in a row
constexpr int kRowBytes = 2 * HEAD_DIM;         // of a position's key or value
constexpr int kHalfBytes = kBlock * kRowBytes;  // keys or values of a block: one stage
constexpr int kSwizzle = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;  // divides kVectors
constexpr int kSteps = HEAD_DIM / 16;

// Floats of a query head's partial result: outputs, row_max, row_sum, padding.
constexpr int kPartial = HEAD_DIM + ATTENTION_PARTIAL_EXTRA;
constexpr int kMaxSplits = ATTENTION_MAX_SPLITS;  // of a KV head of a slot

// Below any score, but finite, so that kMaskedScore - kMaskedScore is 0 and not NaN.
constexpr float kMaskedScore = -1e30f;

extern __shared__ __align__(1024) uint8_t smem[];

struct Tier {
  int first_slot;  // slots are ordered by tier
  int first_cta;
  int window;     // stages that a CTA may have in flight: the congestion window
  int slot_step;  // stride, modulo their number, in which slots are listed
};

// A split of a KV head of a slot that a CTA takes, or several of its splits together. It says all
// that leads to their blocks: short items follow one another faster than it is computed.
struct __align__(16) ListedItem {
  int slot, table;  // the slot's block table
  int length;       // cached positions of the slot
  int first;        // the item's first block
  uint16_t head, split;     // KV head; the first of its splits
  uint16_t splits, count;   // of the head; the item's blocks (MAX_SPLIT_BLOCKS)
  // That the head's splits have, and those before them. Only for items of several splits: fewer
  // than 65,536.
  uint16_t blocks, before;
  uint16_t item_splits, unused;
};

struct SplitKFlashAttnArgs {
  Tier tiers[kMaxTiers + 1];  // one more, for the end of the last
  const uint64_t* tables;  // [][table_blocks]: addresses of the KV blocks of each block table
  const int* table_of;     // [slots]: the slot's block table; null: the slot's number
  const int* lengths;  // [slots]: cached positions before the new token; negative: empty slot
  const Element* q;    // [slots][kv_heads * group][HEAD_DIM], rows `stride` apart
  const Element* k;    // [slots][kv_heads][HEAD_DIM], likewise, of the new token
  const Element* v;
  const float2* rotations;  // [positions][HEAD_DIM / 2] (cos, sin), or null
  Element* out;             // [slots][kv_heads * group][HEAD_DIM]
  float* partials;          // [slots][kv_heads][max_splits][max_chunks][group][kPartial]
  int* arrivals;            // [slots][kv_heads][group + max_splits]: zero between launches
  ListedItem* items;        // [slots][kv_heads][max_splits] of each tier (list_items.cu)
  int* item_counts;         // [tier_count]
  int64_t stride;
  int64_t layer_offset;  // from the address of a block to this layer's part of it
  int64_t head_bytes;    // from the part of one KV head to that of the next
  CtaOrder order;
  int tier_count, kv_heads, group;
  int table_blocks;  // entries of a block table
  int split_blocks;  // blocks of a split at most
  int chunk_blocks;  // blocks of a chunk at most, or more where a split has kWarps chunks
  int item_splits;   // splits of an item at most; 1 where splits are cut into chunks
  int max_splits, max_chunks;
  int stages;
  float scale;  // of the scores, times log2(e), for exp2
  // With kPrefixes
  const int* prefix_blocks;  // [slots]: leading blocks that `prefixes` covers; fewer than all
  const float* prefixes;     // [slots][kv_heads * group][kPartial]: partial results of prompt_attn
  // With kSpilled
  const int* spilled_blocks;  // [slots]: leading blocks of a local slot that lie in tier 1
  // With kHeadNorms
  const Element* q_norm;  // [HEAD_DIM]: weights
  const Element* k_norm;
  float norm_eps;
};

// XOR mask of the 16-byte vectors of a row: vector v lies at v ^ swizzle_of(row). Equal vectors of
// 8 consecutive rows then lie in different banks.
__device__ __forceinline__ int swizzle_of(int row) {
  return row % 8 * kSwizzle / 8;
}

// The number of a slot's block table.
__device__ __forceinline__ int table_of(const SplitKFlashAttnArgs& args, int slot) {
  return args.table_of == nullptr ? slot : args.table_of[slot];
}

// The entries of a block table.
__device__ __forceinline__ const uint64_t* entries_of(const SplitKFlashAttnArgs& args, int table) {
  return args.tables + static_cast<int64_t>(table) * args.table_blocks;
}

// Offset of a KV head's part from the address of a block.
__device__ __forceinline__ int64_t head_offset(const SplitKFlashAttnArgs& args, int head) {
  return args.layer_offset + head * args.head_bytes;
}

// The tiers' lists. CTAs of the first remote tier may read blocks of local slots, too (kSpilled).
struct TierItems {
  int first_slot, slots;
  ListedItem* list;

  __device__ __forceinline__ TierItems(const SplitKFlashAttnArgs& args, int tier) {
    const int own = args.tiers[tier].first_slot, local = kSpilled ? args.tiers[1].first_slot : 0;
    first_slot = kSpilled && tier == 1 ? 0 : own;
    slots = args.tiers[tier + 1].first_slot - first_slot;
    const int64_t before = tier > 1 ? own + local : own;  // slots of the lists before this one
    list = args.items + before * args.kv_heads * args.max_splits;
  }
};

// Iterator over the work items of a CTA. CTAs take those of their tier's list, the largest first,
// in rounds of alternating direction: so all get about as many blocks, whatever the slots' lengths.
// A lane knows the listed item of one of 32 rounds, and the address of its first block.
struct WorkItems {
  const SplitKFlashAttnArgs& args;
  const ListedItem* const list;
  const int cta, ctas, all;  // of the tier: CTAs, and listed items
  int round = 0, number;     // of the listed item
  ListedItem own = {};       // of the lane
  int own_chunks = 0;
  uint64_t own_block = 0;
  ListedItem listed = {};
  int chunk = 0, chunks = 1;  // of its split; one where it has several splits
  uint64_t block = 0;         // address of its first block

  // Called by all lanes of a warp, like locate().
  __device__ __forceinline__ WorkItems(const SplitKFlashAttnArgs& args, int tier)
      : args(args),
        list(TierItems(args, tier).list),
        cta(args.order.number() - args.tiers[tier].first_cta),
        ctas(args.tiers[tier + 1].first_cta - args.tiers[tier].first_cta),
        all(args.item_counts[tier]),
        number(cta) {}

  __device__ __forceinline__ bool done() const { return number >= all; }
  __device__ __forceinline__ int first_block() const {
    return chunk == 0 ? listed.first : listed.first + chunk * listed.count / chunks;
  }
  __device__ __forceinline__ int block_count() const {
    return chunks == 1 ? listed.count
                       : listed.first + (chunk + 1) * listed.count / chunks - first_block();
  }
  // Of the slot's block table.
  __device__ __forceinline__ const uint64_t* entry(int block) const {
    return entries_of(args, listed.table) + block;
  }
  __device__ __forceinline__ void next() {
    if (++chunk < chunks) return;
    chunk = 0, round++;
    number = number_in(round);
  }
  // Complete the step to the item: find it. Call it only if not done().
  __device__ __forceinline__ void locate() {
    if (chunk > 0) return;
    if (round % 32 == 0) fetch();
    const int lane = round % 32;
    block = __shfl_sync(0xffffffff, own_block, lane);
    chunks = __shfl_sync(0xffffffff, own_chunks, lane);
    listed = shuffled(own, lane);
  }
  // Items from this one on, of the first 32 rounds. Call it in one of these, after a locate().
  __device__ __forceinline__ int left() const {
    const int lane = threadIdx.x % 32;
    const int here = lane < round % 32 ? 0 : lane == round % 32 ? own_chunks - chunk : own_chunks;
    return __reduce_add_sync(0xffffffff, here);
  }

 private:
  __device__ __forceinline__ int number_in(int round) const {
    return round * ctas + (round % 2 ? ctas - 1 - cta : cta);
  }
  __device__ __forceinline__ void fetch() {
    const int number = number_in(round + threadIdx.x % 32);
    own_chunks = 0;
    if (number >= all) return;
    own = list[number];
    own_block = entries_of(args, own.table)[own.first];
    const int chunks_of_split = (own.count + args.chunk_blocks - 1) / args.chunk_blocks;
    own_chunks = own.item_splits > 1 ? 1 : min(kWarps, chunks_of_split);
  }
  // A lane's item, for all lanes.
  __device__ __forceinline__ static ListedItem shuffled(const ListedItem& item, int lane) {
    const uint32_t heads = item.head << 16 | item.split, splits = item.splits << 16 | item.count,
                   blocks = item.blocks << 16 | item.before;
    ListedItem found;
    found.slot = __shfl_sync(0xffffffff, item.slot, lane);
    found.table = __shfl_sync(0xffffffff, item.table, lane);
    found.length = __shfl_sync(0xffffffff, item.length, lane);
    found.first = __shfl_sync(0xffffffff, item.first, lane);
    const uint32_t of_heads = __shfl_sync(0xffffffff, heads, lane);
    const uint32_t of_splits = __shfl_sync(0xffffffff, splits, lane);
    const uint32_t of_blocks = __shfl_sync(0xffffffff, blocks, lane);
    found.item_splits = __shfl_sync(0xffffffff, static_cast<int>(item.item_splits), lane);
    found.head = of_heads >> 16, found.split = of_heads & 0xffff;
    found.splits = of_splits >> 16, found.count = of_splits & 0xffff;
    found.blocks = of_blocks >> 16, found.before = of_blocks & 0xffff;
    return found;
  }
};
