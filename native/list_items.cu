// The work items of SplitK_FlashAttn: once for all layers of a step, by the lengths of its slots.
//
//   a CTA for each tier:
//     for each slot: its items, each of some splits of a KV head; their size: blocks of one
//     list the items of all slots by size, the largest first (counting sort)
//
// Variants differ in -DPREFIXES and -DSPILLED alone: the other macros change nothing here.

#include "splitk_flash_attn.cuh"

using ListItemsArgs = SplitKFlashAttnArgs;
constexpr int kListThreads = ROW_THREADS;
constexpr int kSizes = 256;  // that are told apart, and threads that add up their counts

extern "C" __global__ void __launch_bounds__(kListThreads)
    list_items(const __grid_constant__ ListItemsArgs args) {
  __shared__ int places[kSizes];  // where the next item of a size goes
  __shared__ int sums[kSizes / 32];
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int tier = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
  const int step = args.tiers[tier].slot_step;
  const TierItems of(args, tier);
  const auto slot_of = [&](int number) {
    return of.first_slot + (step == 1 ? number : number * step % of.slots);
  };
  // Items of a slot, of all KV heads, and their size, 0 the largest.
  const auto sized = [&](int slot, int& size) {
    const HeadItems items(args, slot, args.lengths[slot], tier);
    if (items.count == 0) return 0;
    const int blocks = items.layout.first_block(items.range.end) -
                       items.layout.first_block(items.range.begin);
    const int largest = args.split_blocks * args.item_splits;
    size = (kSizes - 1) - (kSizes - 1) * ((blocks + items.count - 1) / items.count) / largest;
    return items.count * args.kv_heads;
  };
  for (int i = thread; i < kSizes; i += kListThreads)
    places[i] = 0;
  __syncthreads();
  for (int i = thread; i < of.slots; i += kListThreads) {
    int size, items = sized(slot_of(i), size);
    if (items > 0) atomicAdd(places + size, items);
  }
  __syncthreads();
  // Items that are larger than those of each size.
  int own = 0, sum = 0;
  if (thread < kSizes) {
    own = sum = places[thread];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_sync(0xffffffff, sum, max(lane - distance, 0));
      if (lane >= distance) sum += before;
    }
    if (lane == 31) sums[thread / 32] = sum;
  }
  __syncthreads();
  if (thread < kSizes) {
    for (int i = 0; i < thread / 32; i++)
      sum += sums[i];
    places[thread] = sum - own;
    if (thread == kSizes - 1) args.item_counts[tier] = sum;
  }
  __syncthreads();
  for (int i = thread; i < of.slots; i += kListThreads) {
    const int slot = slot_of(i);
    int size, items = sized(slot, size);
    if (items == 0) continue;
    const int at = atomicAdd(places + size, items), each = items / args.kv_heads;
    for (int j = 0; j < items; j++) {
      const int head = j / each;
      of.list[at + j] = {slot, static_cast<uint16_t>(head), static_cast<uint16_t>(j - head * each)};
    }
  }
}
