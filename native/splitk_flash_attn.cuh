// What SplitK_FlashAttn works on: its arguments, and the items of a CTA.
#pragma once

#include "common.cuh"
#include "element.cuh"
#include "geometry.cuh"

constexpr int kMaxStages = ATTENTION_MAX_STAGES;
constexpr int kWarps = GROUP_TILES == 1
                           ? ATTENTION_WARPS
                           : ATTENTION_WARPS_LARGE_GROUP;  // that attend, each to blocks of its own
constexpr int kThreads = 32 * (kWarps + 1);                // and one that copies
constexpr int kBlock = KV_BLOCK;                           // positions
constexpr int kTileRows = 16;                              // the height of an mma
constexpr int kTiles = kBlock / kTileRows;
constexpr int kChunks = HEAD_DIM / 8;
constexpr int kRowBytes = 2 * HEAD_DIM;         // of a position
constexpr int kHalfBytes = kBlock * kRowBytes;  // keys, or values, of a block: a stage
constexpr int kSwizzle = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;  // divides the chunks
constexpr int kSteps = HEAD_DIM / 16;

constexpr int kPart =
    HEAD_DIM + ATTENTION_PARTIAL_EXTRA;         // values of a head, largest score, sum of weights
constexpr int kMaxUnits = ATTENTION_MAX_UNITS;  // of a KV head of a slot

// One cubin per dtype, head size and size of the groups: BFLOAT16, HEAD_DIM, GROUP_TILES.
constexpr float kNone = -1e30f;  // less than any score, and no infinity: less itself it is zero

extern __shared__ __align__(1024) uint8_t smem[];

struct Tier {
  int first_slot;  // slots are ordered by tiers
  int first_cta;
  int window;     // stages, each half a block, that a CTA may have in flight
  int slot_step;  // from a slot to the next one that its CTAs go to, behind the last from the first
  int heads;      // of a slot, that they go to before they do
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
  float* partials;          // [slots][kv_heads][max_units][max_parts][group][kPart]
  int* arrivals;            // [slots][kv_heads][group + max_units]: zero before and after
  int64_t stride;
  CtaOrder order;
  int tier_count, kv_heads, group;
  int slot_blocks;               // that a cache has room for, of each KV head
  int unit_blocks, part_blocks;  // at most, unless there is no warp left for a part
  int item_units;                // at most, of an item that is no part: 1 where units have parts
  int max_units, max_parts;
  int stages;
  float scale;  // of the scores, times log2(e)
};

// By what the places of a row's chunks of 8 dimensions differ from their numbers, bit by bit: so
// the same chunks of 8 rows lie in different banks.
__device__ __forceinline__ int swizzle_of(int row) {
  return row % 8 * kSwizzle / 8;
}

__device__ __forceinline__ int blocks_of(const SplitKFlashAttnArgs& args, int slot) {
  const int length = args.lengths[slot];
  return length < 0 ? 0 : length / kBlock + 1;
}

// How the blocks of a KV head are shared out: to CTAs by units, as few as can be, and of a unit to
// warps by parts, as even as can be. What a warp attends to, an item, is a part, or some units, of
// which each has a softmax of its own.
struct Cut {
  int blocks, units;

  Cut() = default;
  __device__ __forceinline__ Cut(const SplitKFlashAttnArgs& args, int blocks)
      : blocks(blocks), units(over(blocks, args.unit_blocks)) {}

  __device__ __forceinline__ int first_block(int unit) const {
    return unit == 0 ? 0 : unit * blocks / units;
  }
  __device__ __forceinline__ int block_count(int unit) const {
    return first_block(unit + 1) - first_block(unit);
  }
  // The first unit that starts at `block` or behind it.
  __device__ __forceinline__ int unit_from(int block) const {
    return (block * units + blocks - 1) / blocks;
  }
  __device__ __forceinline__ int parts(const SplitKFlashAttnArgs& args, int unit) const {
    return min(kWarps, over(block_count(unit), args.part_blocks));
  }

 private:
  // Rounded up. A divisor that the compiler knows would have its reciprocal in a register for good.
  __device__ __forceinline__ static int over(int blocks, int divisor) {
    if (blocks <= divisor) return blocks > 0;
    const int other = ptx::anew(divisor);
    return (blocks + other - 1) / other;
  }
};

// The items of a CTA, one after the other: part by part, unit by unit, head by head, slot by slot,
// and where a tier's heads are not gone to at once, from the first slot again. Short slots have
// many for what there is to copy: where an item is a whole head, nothing is divided to find the
// next.
struct Items {
  const SplitKFlashAttnArgs& args;
  const int first_slot, slots, slot_step, heads;
  int number = 0;      // of the slot, as they are gone to
  int first_head = 0;  // of those that are gone to before the next slot
  int slot = 0, head = 0, unit = 0, part = 0;
  int length = 0;  // of the slot: its cached positions
  Cut cut = {};    // of each of its heads
  int item_units = 1;
  int first = 0, count = 0;        // blocks of these units
  int parts = 1, whole_parts = 1;  // of the unit; of the slot's heads, if these are units
  uint8_t* cache = nullptr;        // the slot's own
  int left;                        // blocks up to where the next CTA's items start

  // All lanes of a warp. A unit is the CTA's in whose even share of the tier's blocks it starts.
  __device__ __forceinline__ Items(const SplitKFlashAttnArgs& args, int of_tier)
      : args(args),
        first_slot(args.tiers[of_tier].first_slot),
        slots(args.tiers[of_tier + 1].first_slot - first_slot),
        slot_step(args.tiers[of_tier].slot_step),
        heads(args.tiers[of_tier].heads) {
    const Tier &tier = args.tiers[of_tier], &next = args.tiers[of_tier + 1];
    const int lane = threadIdx.x % 32;
    int total = 0;
#pragma unroll 4
    for (int first = 0; first < slots; first += 32) {
      if (first + lane >= slots) continue;
      ptx::prefetch(args.caches + first_slot + first + lane);
      total += blocks_of(args, first_slot + first + lane);
    }
#pragma unroll
    for (int far = 1; far < 32; far *= 2)
      total += __shfl_xor_sync(0xffffffff, total, far);
    const int ctas = next.first_cta - tier.first_cta;
    const int cta = args.order.number() - tier.first_cta;
    const int all = total * args.kv_heads, each = all / ctas, more = all % ctas;
    int start = each * cta + more * cta / ctas;
    left = each * (cta + 1) + more * (cta + 1) / ctas - start;
    if (heads < args.kv_heads && total > 0) {
      first_head = start / (total * heads) * heads;
      start -= first_head * total;
    }
    // The first slot that ends behind `start`, 32 slots at a time.
    while (number < slots) {
      int sum = number + lane < slots ? blocks_of(args, slot_of(number + lane)) : 0;
#pragma unroll
      for (int far = 1; far < 32; far *= 2) {
        const int before = __shfl_sync(0xffffffff, sum, lane < far ? lane : lane - far);
        if (lane >= far) sum += before;
      }
      // Slots of these that end at `start` or before.
      const int ends = sum * heads;
      const int behind = __popc(__ballot_sync(0xffffffff, ends <= start));
      const int passed = behind ? __shfl_sync(0xffffffff, ends, behind - 1) : 0;
      number += behind;
      start -= passed;
      if (behind < 32) break;
    }
    if (number >= slots) {
      left = 0;
      return;
    }
    enter();
    if (cut.blocks == 0) {
      left = 0;
      return;
    }
    head = start / cut.blocks;
    const int within = start - head * cut.blocks;
    head += first_head;
    unit = cut.unit_from(within);
    left -= cut.first_block(unit) - within;
  }

  __device__ __forceinline__ bool done() const { return left <= 0; }
  __device__ __forceinline__ int first_block() const {
    return parts == 1 ? first : first + part * count / parts;
  }
  __device__ __forceinline__ int block_count() const {
    return parts == 1 ? count : first + (part + 1) * count / parts - first_block();
  }
  // The first block of the item.
  __device__ __forceinline__ uint8_t* address() const {
    const int64_t at = static_cast<int64_t>(head) * args.slot_blocks + first_block();
    return cache + at * 2 * kHalfBytes;
  }
  __device__ __forceinline__ void next() {
    if (++part < parts) return;
    left -= count;
    unit += item_units, part = 0;
  }
  // To be called before the item is looked at, where there is one: goes to the next head or slot
  // where this one has no more units; `left` bounds the slots.
  __device__ __forceinline__ void settle() {
    if (part > 0) return;
    if (unit >= cut.units) {
      unit = 0;
      if (++head >= first_head + heads) {
        do {
          if (++number == slots) number = 0, first_head += heads;
          enter();
        } while (cut.blocks == 0);
        head = first_head;
      }
    }
    if (cut.units == 1) {
      item_units = 1, first = 0, count = cut.blocks, parts = whole_parts;
      return;
    }
    // The units that start in the CTA's share.
    const int end = min(cut.units, cut.unit_from(cut.first_block(unit) + min(left, cut.blocks)));
    item_units = min(args.item_units, end - unit);
    first = cut.first_block(unit), count = cut.first_block(unit + item_units) - first;
    parts = cut.parts(args, unit);
  }

 private:
  __device__ __forceinline__ int slot_of(int number) const {
    return first_slot + (slot_step == 1 ? number : number * slot_step % slots);
  }
  __device__ __forceinline__ void enter() {
    slot = slot_of(number);
    length = args.lengths[slot];
    cut = Cut(args, blocks_of(args, slot));
    if (cut.units == 1) whole_parts = cut.parts(args, 0);
    cache = reinterpret_cast<uint8_t*>(args.caches[slot]);
  }
};
