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
  int slot_step;  // stride of the order in which slots are visited, modulo their number
  int heads;      // KV heads visited of a slot before the next slot
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

// KV blocks of a slot behind those, with the new token; 0 for an empty slot.
__device__ __forceinline__ int blocks_of(const SplitKFlashAttnArgs& args, int slot) {
  const int length = args.lengths[slot];
  return length < 0 ? 0 : length / kBlock + 1 - prefix_blocks_of(args, slot);
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
  __device__ __forceinline__ int blocks(const SplitLayout& layout) const {
    return kSpilled ? layout.first_block(end) - layout.first_block(begin) : layout.blocks;
  }
};

// Iterator over the work items of a CTA: chunks of a split, splits of a KV head, `heads` KV heads
// of a slot, slots of the tier; then again from the first slot with the next `heads`. Short slots
// have many items for few bytes: where an item is a whole head, the next one is found without a
// division.
struct WorkItems {
  const SplitKFlashAttnArgs& args;
  const int tier, first_slot, slots, slot_step, heads;
  int slot_index = 0;  // of the slot, in the order of visits
  int first_head = 0;  // the first of the `heads` KV heads of this pass over the slots
  int slot = 0, head = 0, split = 0, chunk = 0;
  int length = 0;           // cached positions of the slot
  int before = 0;           // its blocks before those of the layout
  SplitLayout layout = {};  // of each head of the slot
  SplitRange range = {};    // of the layout, in the tier
  int range_blocks = 0;
  int item_splits = 1;
  int first = 0, count = 0;          // blocks of the item's splits, counted from `before` on
  int chunks = 1, whole_chunks = 1;  // of the split; of a head, if layout.splits is 1
  const uint64_t* table = nullptr;   // of the slot
  int blocks_left;                   // blocks up to the items of the next CTA

  // Called by all lanes of a warp. CTAs get equal shares of the tier's blocks; a split belongs to
  // the CTA in whose share it starts.
  __device__ __forceinline__ WorkItems(const SplitKFlashAttnArgs& args, int of_tier)
      : args(args),
        tier(of_tier),
        first_slot(kSpilled && of_tier == 1 ? 0 : args.tiers[of_tier].first_slot),
        slots(args.tiers[of_tier + 1].first_slot - first_slot),
        slot_step(args.tiers[of_tier].slot_step),
        heads(args.tiers[of_tier].heads) {
    const Tier &tier = args.tiers[of_tier], &next = args.tiers[of_tier + 1];
    const int lane = threadIdx.x % 32;
    // 1. Blocks of all slots, per KV head, and the CTA's share of the tier's blocks.
    int total = 0;
#pragma unroll 4
    for (int first = 0; first < slots; first += 32) {
      if (first + lane >= slots) continue;
      ptx::prefetch(table_of(args, first_slot + first + lane));
      total += blocks_in_tier(first_slot + first + lane);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      total += __shfl_xor_sync(0xffffffff, total, distance);
    const int ctas = next.first_cta - tier.first_cta;
    const int cta = args.order.number() - tier.first_cta;
    const int all = total * args.kv_heads, each = all / ctas, more = all % ctas;
    int start = each * cta + more * cta / ctas;
    blocks_left = each * (cta + 1) + more * (cta + 1) / ctas - start;
    if (heads < args.kv_heads && total > 0) {
      first_head = start / (total * heads) * heads;
      start -= first_head * total;
    }
    // 2. The slot that contains block `start`, by prefix sums over 32 slots at a time.
    while (slot_index < slots) {
      int sum = slot_index + lane < slots ? blocks_in_tier(slot_of(slot_index + lane)) : 0;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_sync(0xffffffff, sum, lane < distance ? lane : lane - distance);
        if (lane >= distance) sum += before;
      }
      // Slots that end at or before `start`.
      const int ends = sum * heads;
      const int behind = __popc(__ballot_sync(0xffffffff, ends <= start));
      const int passed = behind ? __shfl_sync(0xffffffff, ends, behind - 1) : 0;
      slot_index += behind;
      start -= passed;
      if (behind < 32) break;
    }
    if (slot_index >= slots) {
      blocks_left = 0;
      return;
    }
    // 3. The first head and split in the share.
    enter_slot();
    if (range_blocks == 0) {
      blocks_left = 0;
      return;
    }
    head = start / range_blocks;
    int within = start - head * range_blocks;
    if (kSpilled) within += layout.first_block(range.begin);
    head += first_head;
    split = layout.split_from(within);
    blocks_left -= layout.first_block(split) - within;
  }

  __device__ __forceinline__ bool done() const { return blocks_left <= 0; }
  __device__ __forceinline__ int first_block() const {
    return chunks == 1 ? first : first + chunk * count / chunks;
  }
  __device__ __forceinline__ int block_count() const {
    return chunks == 1 ? count : first + (chunk + 1) * count / chunks - first_block();
  }
  __device__ __forceinline__ void next() {
    if (++chunk < chunks) return;
    blocks_left -= count;
    split += item_splits, chunk = 0;
  }
  // Complete the step to the item after next(): go to the next head or slot if the splits of this
  // one are done. Call it only if not done(): the search for a slot with blocks would not end.
  __device__ __forceinline__ void locate() {
    if (chunk > 0) return;
    if (split >= (kSpilled ? range.end : layout.splits)) {
      if (++head >= first_head + heads) {
        do {
          if (++slot_index == slots) slot_index = 0, first_head += heads;
          enter_slot();
        } while (range_blocks == 0);
        head = first_head;
      }
      split = kSpilled ? range.begin : 0;
    }
    if (layout.splits == 1) {
      item_splits = 1, first = 0, count = layout.blocks, chunks = whole_chunks;
      return;
    }
    // Splits that start in the CTA's share.
    const int end = min(kSpilled ? range.end : layout.splits, layout.split_from(layout.first_block(split) +
                                                         min(blocks_left, layout.blocks)));
    item_splits = min(args.item_splits, end - split);
    first = layout.first_block(split), count = layout.first_block(split + item_splits) - first;
    chunks = layout.chunks(args, split);
  }

 private:
  // KV blocks of a head of a slot that the tier's CTAs read.
  __device__ __forceinline__ int blocks_in_tier(int of_slot) const {
    const int blocks = blocks_of(args, of_slot);
    if (!kSpilled || blocks == 0) return blocks;
    const SplitLayout of(args, blocks);
    return SplitRange(args, of, of_slot, prefix_blocks_of(args, of_slot), tier).blocks(of);
  }
  __device__ __forceinline__ int slot_of(int slot_index) const {
    return first_slot + (slot_step == 1 ? slot_index : slot_index * slot_step % slots);
  }
  __device__ __forceinline__ void enter_slot() {
    slot = slot_of(slot_index);
    length = args.lengths[slot];
    before = length < 0 ? 0 : prefix_blocks_of(args, slot);
    layout = SplitLayout(args, blocks_of(args, slot));
    range = SplitRange(args, layout, slot, before, tier);
    range_blocks = range.blocks(layout);
    if (layout.splits == 1) whole_chunks = layout.chunks(args, 0);
    table = table_of(args, slot);
  }
};
