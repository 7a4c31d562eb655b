// Combine step of split-KV attention: which warp combines partial results, and when.
#pragma once

#include "attention_sums.cuh"

// Add `more` arrivals to the counter `at`, of `all` in total. True for the last arrival, which
// resets the counter. One lane calls it for a warp, or several lanes each for a counter of their
// own. acq_rel at gpu scope: partials stored before are visible to the last arrival.
__device__ __forceinline__ bool arrive(int* at, int more, int all) {
  const bool last = ptx::atomic_add_acq_rel(at, more) == all - more;
  if (last) *at = 0;
  return last;
}

// Finishes items that do not cover their whole KV head.
//
// While the CTA has more items, the partial result of a chunk goes to global memory, and the last
// chunk of a split to arrive combines the split; other warps go on. After the last items the ring
// is free: all warps store their partials there and share the work of combining. Partial results of
// splits always go to global memory, where the last split of a KV head to arrive combines them.
struct Combiner {
  const SplitKFlashAttnArgs& args;
  Shared& shared;

  // Record the warp's item. If it has several splits, the record is of the current one.
  __device__ __forceinline__ void begin(const Task& task) const {
    const uint32_t thread = ptx::opaque<uint32_t>(threadIdx.x);
    sync_warp();  // all lanes have read the previous record
    if (thread % 32 > 0) return;
    const int kv_head = task.slot * args.kv_heads + task.head;
    ItemRecord& record = shared.records[thread / 32];
    const uint8_t before = record.splits_left > 1 ? record.item_splits : 0;
    record = {kv_head,
              task.split,
              task.splits,
              task.chunk,
              task.chunks,
              task.splits_left,
              static_cast<uint8_t>(before + 1)};
  }
  __device__ __forceinline__ ItemRecord current() const {
    sync_warp();
    return shared.records[ptx::opaque<uint32_t>(threadIdx.x) / 32];
  }

  // Store the partial result of the warp's item if there is one (`partial`), and combine what is
  // then complete. At the `end` of the CTA's items all its threads call this.
  __device__ __forceinline__ void finish_item(bool partial, const Accumulators& acc,
                                              bool end) const {
    const int thread = ptx::opaque<uint32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    if (end) {
      if (args.max_chunks == 1) return;
      sync_warp();  // all lanes have read the record
      if (!partial && lane == 0 && warp < kWarps) shared.records[warp].kv_head = kNoKvHead;
#if DAK_POISON
      ptx::sleep(poison_ns(warp, 0));
#endif
      __syncthreads();
#if DAK_POISON
      if (warp < kWarps) poison(warp);
      ptx::sleep(poison_ns(warp, 1));
#endif
    }
    if (partial) {
      const ItemRecord record = shared.records[warp];
      const KvHead kv_head(args, record);
      float* const smem_partial = reinterpret_cast<float*>(smem) + warp * kv_head.size;
      store_partial(acc, args.group,
                    end ? smem_partial : kv_head.partial(record.split, record.chunk));
      if (record.splits_left > 1) return;
      __syncwarp();
      if (!end && record.chunks > 1) {
        bool last = false;
        if (lane == 0) last = arrive(kv_head.chunk_arrivals(record.split), 1, record.chunks);
        if (!__ballot_sync(0xffffffff, last)) return;
        __syncwarp();  // what lane 0 acquired, other lanes read
      }
    }
    if (end) {
      __syncthreads();
      sync_checked();  // the race checker misses that the barrier above orders the partials
    }
    combine(end);
  }

 private:
#if DAK_POISON
  // For a test: warps reach the barriers at different times, and a region of the ring holds NaN from
  // the first barrier until its warp stores. Reads that pass a barrier too early find NaN, and so do
  // warps whose stages are overwritten too early.
  __device__ __forceinline__ void poison(int warp) const {
    const int size = args.group * kPartial;
    for (int i = threadIdx.x % 32; i < size; i += 32)
      reinterpret_cast<uint32_t*>(smem)[warp * size + i] = 0x7fffffff;
    __syncwarp();
  }
  // Nanoseconds that a warp sleeps, up to 32 us: half of the warps not at all.
  __device__ __forceinline__ uint32_t poison_ns(int warp, int site) const {
    uint32_t bits = (static_cast<uint32_t>(ptx::globaltimer()) >> 5) + blockIdx.x * 97;
    bits = (bits + warp * 2 + site) * 2654435761u;
    return bits >> 31 ? bits >> 16 & 0x7fff : 0;
  }
#endif
  // Combine the chunks of the warp's split; then the splits of every KV head that is now complete.
  // At the `end` all warps do this for the splits of all warps, with query heads round-robin.
  __device__ __forceinline__ void combine(bool end) const {
    const int thread = ptx::opaque<uint32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int step = end ? kWarps + 1 : 1;
    // 1. If `end`, lane w holds the record of warp w; else every lane holds that of its own warp.
    // `first` marks the first record of each split.
    const ItemRecord lanes = shared.records[end ? min(lane, kWarps - 1) : warp];
    bool first = end ? lane < kWarps && lanes.kv_head >= 0 : lane == 0;
#pragma unroll
    for (int i = 0; i < kWarps - 1; i++) {
      const int kv_head = __shfl_sync(0xffffffff, lanes.kv_head, i);
      const int split = __shfl_sync(0xffffffff, static_cast<int>(lanes.split), i);
      if (kv_head == lanes.kv_head && split == lanes.split && i < lane) first = false;
    }
    // 2. Combine chunks to splits. Lane i keeps the record and head of the i-th arrival.
    int head = end ? warp : 0, arrivals = 0;
    int arrival_record = 0, arrival_head = 0;
#pragma unroll 1
    for (uint32_t all = __ballot_sync(0xffffffff, first); all; all &= all - 1) {
      const int number = end ? __ffs(all) - 1 : warp;
      const ItemRecord of = shared.records[number];
      const KvHead kv_head(args, of);
      if (end && of.chunks > 1 && threadIdx.x == 0) *kv_head.chunk_arrivals(of.split) = 0;
      if (head < args.group) {
        int holder = kInGlobal;
#pragma unroll
        for (int i = 0; i < kWarps; i++) {
          const bool same = end && lanes.kv_head == of.kv_head && lanes.split == of.split;
          const int chunk = __shfl_sync(0xffffffff, same ? lanes.chunk : kInGlobal, i);
          if (chunk == lane) holder = i;
        }
#pragma unroll 1
        for (; head < args.group; head += step) {
          if (end || of.chunks > 1) {
            const Combined combined = combine_chunks(kv_head, of, head, holder);
            if (kv_head.splits == 1) {
              combined.store(kv_head.outputs(head));
            } else {
              combined.store_partial(kv_head.partial(of.split, 0) + head * kPartial);
            }
          }
          if (kv_head.splits == 1) continue;
          if (lane == arrivals) arrival_record = number, arrival_head = head;
          arrivals++;
        }
      }
      head -= args.group;
    }
    // 3. Announce the splits. `last` marks heads whose splits have all arrived.
    __syncwarp();
    if (arrivals == 0) return;
    bool last = false;
    if (lane < arrivals) {
      const ItemRecord& of = shared.records[arrival_record];
      const KvHead kv_head(args, of);
      last = of.item_splits == of.splits ||
             arrive(kv_head.split_arrivals(arrival_head), of.item_splits, of.splits);
    }
    // 4. Combine the splits of these heads.
    uint32_t all = __ballot_sync(0xffffffff, last);
    __syncwarp();  // what some lanes acquired, all read
    if (!end) {  // one split: lane i has head i
      const KvHead kv_head(args, shared.records[ptx::opaque<uint32_t>(threadIdx.x) / 32]);
      if (kv_head.splits <= kFewSplits) {
#pragma unroll 1
        for (int first = 0; all; first += kHeadsAtOnce, all >>= kHeadsAtOnce)
          combine_few_splits(kv_head, first, all);
        return;
      }
    }
#pragma unroll 1
    for (; all; all &= all - 1) {
      const int from = __ffs(all) - 1;
      const KvHead kv_head(args, shared.records[__shfl_sync(0xffffffff, arrival_record, from)]);
      const int of_head = __shfl_sync(0xffffffff, arrival_head, from);
      combine_splits(kv_head, of_head).store(kv_head.outputs(of_head));
    }
  }
};
