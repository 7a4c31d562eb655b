// The work items of SplitK_FlashAttn: once for all layers of a step, by the lengths of its slots.
//
//   a CTA for each tier:
//     for each slot: its items, each of some splits of a KV head; their size in KV blocks
//     list the items of all slots by size, the largest first (counting sort)
//
// Variants differ in -DPREFIXES and -DSPILLED alone: the other macros change nothing here.

#include "splitk_flash_attn.cuh"

using ListItemsArgs = SplitKFlashAttnArgs;
constexpr int kListThreads = ELEMENTWISE_THREADS, kListWarps = kListThreads / 32;
constexpr int kBins = 256;  // of sizes, and threads that add up how many items are in each

// How the blocks of a KV head are divided: into as few splits as split_blocks allows, each of one
// CTA, which divides a split into chunks of about equal size, each of one warp. A warp's work item
// is a chunk, or several whole splits, each with a softmax of its own.
struct SplitLayout {
  int blocks, splits;

  SplitLayout() = default;
  __device__ __forceinline__ SplitLayout(const ListItemsArgs& args, int blocks)
      : blocks(blocks), splits((blocks + args.split_blocks - 1) / args.split_blocks) {}

  __device__ __forceinline__ int first_block(int split) const {
    return split == 0 ? 0 : split == splits ? blocks : split * blocks / splits;
  }
  // The first split that starts at or after `block`.
  __device__ __forceinline__ int split_from(int block) const {
    return (block * splits + blocks - 1) / blocks;
  }
};

// The items of a KV head: up to args.item_splits of its splits together, of those that CTAs of a
// tier read: all, or of a local slot with spilled blocks those that start in the tier.
struct HeadItems {
  int before;          // leading KV blocks, to which attention is computed before
  SplitLayout layout;  // of the blocks behind them
  int begin, end;      // the tier's splits
  int count;

  HeadItems() = default;
  // Of each head of a slot of `length` cached positions; negative: there are none.
  __device__ __forceinline__ HeadItems(const ListItemsArgs& args, int slot, int length, int tier)
      : before(kPrefixes && length >= 0 ? args.prefix_blocks[slot] : 0),
        layout(args, length < 0 ? 0 : length / kBlock + 1 - before),
        begin(0),
        end(layout.splits) {
    if (kSpilled && end > 0 && slot < args.tiers[1].first_slot) {
      const int spilled = max(0, min(layout.blocks, args.spilled_blocks[slot] - before));
      const int border = layout.split_from(spilled);
      if (tier == 0) begin = border;
      if (tier > 0) end = border;
    }
    count = (end - begin + args.item_splits - 1) / args.item_splits;
  }
  // Blocks of the largest item, about.
  __device__ __forceinline__ int largest() const {
    const int blocks = layout.first_block(end) - layout.first_block(begin);
    return (blocks + count - 1) / count;
  }
  // Item `number` in all but what is the same for the slot's items, and its head.
  __device__ __forceinline__ void write(const ListItemsArgs& args, int number,
                                        ListedItem& item) const {
    const int split = begin + number * args.item_splits;
    const int splits = min(args.item_splits, end - split), first = layout.first_block(split);
    item.first = before + first, item.count = layout.first_block(split + splits) - first;
    item.split = split, item.item_splits = splits;
    item.splits = layout.splits, item.blocks = layout.blocks, item.before = before;
  }
};

extern "C" __global__ void __launch_bounds__(kListThreads)
    list_items(const __grid_constant__ ListItemsArgs args) {
  __shared__ int places[kBins];  // of each bin: where its next item goes
  __shared__ int sums[kBins / 32];
  __shared__ HeadItems slot_items[kListThreads];
  __shared__ ListedItem first_items[kListThreads];  // in what a slot's items have in common
  __shared__ int first_places[kListThreads];
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int tier = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
  const int step = args.tiers[tier].slot_step;
  const TierItems of(args, tier);
  const auto slot_of = [&](int number) {
    return of.first_slot + (step == 1 ? number : number * step % of.slots);
  };
  // The bin of a slot's items, 0 for the largest.
  const auto bin_of = [&](const HeadItems& items) {
    return (kBins - 1) - (kBins - 1) * items.largest() / (args.split_blocks * args.item_splits);
  };
  for (int i = thread; i < kBins; i += kListThreads)
    places[i] = 0;
  __syncthreads();
  for (int i = thread; i < of.slots; i += kListThreads) {
    const int slot = slot_of(i);
    const HeadItems items(args, slot, args.lengths[slot], tier);
    if (items.count > 0) atomicAdd(places + bin_of(items), items.count * args.kv_heads);
  }
  __syncthreads();
  // Items in the bins before each.
  int own = 0, sum = 0;
  if (thread < kBins) {
    own = sum = places[thread];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_sync(0xffffffff, sum, max(lane - distance, 0));
      if (lane >= distance) sum += before;
    }
    if (lane == 31) sums[thread / 32] = sum;
  }
  __syncthreads();
  if (thread < kBins) {
    for (int i = 0; i < thread / 32; i++)
      sum += sums[i];
    places[thread] = sum - own;
    if (thread == kBins - 1) args.item_counts[tier] = sum;
  }
  // As many slots as threads at a time: a thread finds the places of a slot's items, and warps
  // list them, several warps those of a slot where there are few slots.
  for (int begin = 0; begin < of.slots; begin += kListThreads) {
    const int slots = min(kListThreads, of.slots - begin);
    __syncthreads();
    if (thread < slots) {
      const int slot = slot_of(begin + thread), length = args.lengths[slot];
      const HeadItems items(args, slot, length, tier);
      if (items.count > 0)
        first_places[thread] = atomicAdd(places + bin_of(items), items.count * args.kv_heads);
      slot_items[thread] = items;
      first_items[thread] = {slot, table_of(args, slot), length};
    }
    __syncthreads();
    const int warps = max(1, kListWarps / slots), first_lane = thread % (32 * warps);
    for (int number = thread / 32 / warps; number < slots; number += kListWarps / warps) {
      const HeadItems& items = slot_items[number];
      ListedItem item = first_items[number];
      ListedItem* const to = of.list + first_places[number];
      for (int i = first_lane; i < items.count * args.kv_heads; i += 32 * warps) {
        item.head = i / items.count;
        items.write(args, i - item.head * items.count, item);
        to[i] = item;
      }
    }
  }
}
