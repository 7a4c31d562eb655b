// The work items of SplitK_FlashAttn: once for all layers of a step, by the lengths of its slots.
//
//   a CTA for each tier:
//     for each slot: its items, each of some splits of a KV head; their size in KV blocks
//     list the items of all slots by size, the largest first (counting sort)
//
// Variants differ in -DPREFIXES and -DSPILLED alone: the other macros change nothing here.

#include "splitk_flash_attn.cuh"

using ListItemsArgs = SplitKFlashAttnArgs;
constexpr int kListThreads = ELEMENTWISE_THREADS;
constexpr int kBins = 256;  // of sizes, and threads that add up how many items are in each

extern "C" __global__ void __launch_bounds__(kListThreads)
    list_items(const __grid_constant__ ListItemsArgs args) {
  __shared__ int places[kBins];  // of each bin: where its next item goes
  __shared__ int sums[kBins / 32];
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int tier = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
  const int step = args.tiers[tier].slot_step;
  const TierItems of(args, tier);
  const auto slot_of = [&](int number) {
    return of.first_slot + (step == 1 ? number : number * step % of.slots);
  };
  // Items of a KV head of a slot, and their bin, 0 for the largest.
  const auto items_of = [&](int slot, int& bin) {
    const HeadItems items(args, slot, args.lengths[slot], tier);
    if (items.count == 0) return 0;
    const int blocks = items.layout.first_block(items.range.end) -
                       items.layout.first_block(items.range.begin);
    const int largest = args.split_blocks * args.item_splits;
    bin = (kBins - 1) - (kBins - 1) * ((blocks + items.count - 1) / items.count) / largest;
    return items.count;
  };
  for (int i = thread; i < kBins; i += kListThreads)
    places[i] = 0;
  __syncthreads();
  for (int i = thread; i < of.slots; i += kListThreads) {
    int bin, items = items_of(slot_of(i), bin);
    if (items > 0) atomicAdd(places + bin, items * args.kv_heads);
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
  __syncthreads();
  for (int i = thread; i < of.slots * args.kv_heads; i += kListThreads) {
    const int number = i / args.kv_heads, slot = slot_of(number);
    int bin, items = items_of(slot, bin);
    if (items == 0) continue;
    const int first = atomicAdd(places + bin, items);
    const uint16_t head = i - number * args.kv_heads;
    for (int j = 0; j < items; j++)
      of.list[first + j] = {slot, head, static_cast<uint16_t>(j)};
  }
}
