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

// Splits of a KV head of a slot that a CTA takes together.
struct ListedItem {
  int slot;
  uint16_t head, number;  // of the head's items, each of `item_splits` splits
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

// Leading KV blocks of a slot, not empty, to which attention is computed before.
__device__ __forceinline__ int prefix_blocks_of(const SplitKFlashAttnArgs& args, int slot) {
  return kPrefixes ? args.prefix_blocks[slot] : 0;
}

// The block table of a slot.
__device__ __forceinline__ const uint64_t* table_of(const SplitKFlashAttnArgs& args, int slot) {
  const int number = args.table_of == nullptr ? slot : args.table_of[slot];
  return args.tables + static_cast<int64_t>(number) * args.table_blocks;
}

// Offset of a KV head's part from the address of a block.
__device__ __forceinline__ int64_t head_offset(const SplitKFlashAttnArgs& args, int head) {
  return args.layer_offset + head * args.head_bytes;
}

// How the blocks of a KV head are divided: into as few splits as split_blocks allows, each of one
// CTA, and a split into chunks of about equal size, each of one warp. A warp's work item is a
// chunk, or several whole splits, each with a softmax of its own.
struct SplitLayout {
  int blocks, splits;

  SplitLayout() = default;
  __device__ __forceinline__ SplitLayout(const SplitKFlashAttnArgs& args, int blocks)
      : blocks(blocks), splits(ceil_div(blocks, args.split_blocks)) {}

  __device__ __forceinline__ int first_block(int split) const {
    return split == 0 ? 0 : split * blocks / splits;
  }
  __device__ __forceinline__ int block_count(int split) const {
    return first_block(split + 1) - first_block(split);
  }
  // The first split that starts at or after `block`.
  __device__ __forceinline__ int split_from(int block) const {
    return (block * splits + blocks - 1) / blocks;
  }
  __device__ __forceinline__ int chunks(const SplitKFlashAttnArgs& args, int split) const {
    return min(kWarps, ceil_div(block_count(split), args.chunk_blocks));
  }

 private:
  // A divisor that the compiler can track would keep its reciprocal in a register throughout.
  __device__ __forceinline__ static int ceil_div(int blocks, int divisor) {
    if (blocks <= divisor) return blocks > 0;
    const int other = ptx::opaque(divisor);
    return (blocks + other - 1) / other;
  }
};

// The splits of a slot's layout that CTAs of a tier read: all, or of a local slot with
// spilled blocks those that start in the tier. The layout is of the blocks from `before` on.
struct SplitRange {
  int begin = 0, end = 0;

  SplitRange() = default;
  __device__ __forceinline__ SplitRange(const SplitKFlashAttnArgs& args, const SplitLayout& layout,
                                        int slot, int before, int tier)
      : end(layout.splits) {
    if (!kSpilled || end == 0 || slot >= args.tiers[1].first_slot) return;
    const int spilled = max(0, min(layout.blocks, args.spilled_blocks[slot] - before));
    const int border = layout.split_from(spilled);
    if (tier == 0) begin = border;
    if (tier > 0) end = border;
  }
};

// Splits that are one item together: up to args.item_splits of a head, of those in the tier.
struct HeadItems {
  SplitLayout layout;  // of the blocks from `before` on
  SplitRange range;
  int before, count;

  HeadItems() = default;
  // Of each head of a slot of `length` cached positions.
  __device__ __forceinline__ HeadItems(const SplitKFlashAttnArgs& args, int slot, int length,
                                       int tier)
      : before(length < 0 ? 0 : prefix_blocks_of(args, slot)) {
    layout = SplitLayout(args, length < 0 ? 0 : length / kBlock + 1 - before);
    range = SplitRange(args, layout, slot, before, tier);
    const int splits = range.end - range.begin;
    count = args.item_splits == 1 ? splits : (splits + args.item_splits - 1) / args.item_splits;
  }
};

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
// A lane knows the item of one of 32 rounds, so that finding the next one delays no copy.
struct WorkItems {
  const SplitKFlashAttnArgs& args;
  const int tier, cta, ctas;
  int round = 0, number, all;  // of the list's items
  ListedItem own = {};         // of the lane
  int own_length = 0;
  int slot = 0, head = 0, split = 0, chunk = 0;
  int length = 0;        // cached positions of the slot
  HeadItems head_items = {};  // of each head of the slot
  int item_splits = 1;
  int first = 0, count = 0;         // blocks of the item's splits, counted from head_items.before on
  int chunks = 1;                   // of the split
  const uint64_t* table = nullptr;  // of the slot

  // Called by all lanes of a warp, like locate().
  __device__ __forceinline__ WorkItems(const SplitKFlashAttnArgs& args, int tier)
      : args(args),
        tier(tier),
        cta(args.order.number() - args.tiers[tier].first_cta),
        ctas(args.tiers[tier + 1].first_cta - args.tiers[tier].first_cta),
        number(cta),
        all(args.item_counts[tier]) {}

  __device__ __forceinline__ bool done() const { return number >= all; }
  __device__ __forceinline__ int first_block() const {
    return chunks == 1 ? first : first + chunk * count / chunks;
  }
  __device__ __forceinline__ int block_count() const {
    return chunks == 1 ? count : first + (chunk + 1) * count / chunks - first_block();
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
    slot = __shfl_sync(0xffffffff, own.slot, round % 32);
    length = __shfl_sync(0xffffffff, own_length, round % 32);
    const uint32_t of_head = __shfl_sync(0xffffffff, own.head << 16 | own.number, round % 32);
    head = of_head >> 16;
    head_items = HeadItems(args, slot, length, tier);
    split = head_items.range.begin + (of_head & 0xffff) * args.item_splits;
    item_splits = min(args.item_splits, head_items.range.end - split);
    first = head_items.layout.first_block(split);
    count = head_items.layout.first_block(split + item_splits) - first;
    chunks = head_items.layout.chunks(args, split);
    table = table_of(args, slot);
  }

 private:
  __device__ __forceinline__ int number_in(int round) const {
    return round * ctas + (round % 2 ? ctas - 1 - cta : cta);
  }
  __device__ __forceinline__ void fetch() {
    const int number = number_in(round + threadIdx.x % 32);
    if (number >= all) return;
    own = TierItems(args, tier).list[number];
    own_length = args.lengths[own.slot];
    ptx::prefetch(table_of(args, own.slot));
  }
};
