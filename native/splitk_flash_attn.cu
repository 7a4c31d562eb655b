// SplitK_FlashAttn: decode attention over a KV cache that lies in several memory tiers.
//
// The new token of every slot attends to the slot's cached keys and values and to its own, which
// the kernel appends to the cache. Split-KV as in FlashDecoding, with the online softmax of
// FlashAttention-2 (arXiv 2307.08691):
//
//   once for all layers: list the KV heads' splits of each tier, large ones first (list_items.cu)
//   for each CTA (CTAs are divided among the tiers, and run side by side):
//     splits = those that the CTA takes of its tier's list, in turn with the others
//     producer warp:
//       for each work item (a chunk of a split, or a few whole splits), round-robin over warps:
//         for each of its KV blocks:
//           wait until the copies in flight leave room in the tier's congestion window
//           wait until the next two stages of the ring are empty
//           bulk-copy the cached keys and values of the block into them
//     attention warps, each for its own items:
//       for each KV block of the item:
//         last block of the slot: append the new token to the stage and to the cache
//         S = K Q^T;  P, row_max, row_sum = online_softmax(S);  accumulators += V^T P^T
//       the item is a whole KV head: store accumulators / row_sum
//       else: store_partial; the last warp to arrive combines the chunks of a split, in order;
//             the last split to arrive combines the splits of a KV head, in order
//
// Tensor cores multiply all query heads of a KV head at once: keys and values are the A operand,
// queries and probabilities the B operand, so that a block is read from shared memory once.
//
// Results do not depend on tiers, batch or CTAs, to the bit: the size of splits and chunks follows
// from the capacity of the cache and the length of the slot, and they are combined in order.
//
// Cache layout: KV blocks of 64 positions, found by the slot's block table. A KV head's part of a
// block is [keys, values][64][HEAD_DIM], with the 16-byte vectors of a row swizzled (swizzle_of)
// against bank conflicts of matrix loads.

#include "attention_merge.cuh"
#include "attention_operands.cuh"
#include "attention_producer.cuh"
#include "attention_softmax.cuh"

// Prefetch what an attention warp needs for its first item and predecessor kernels do not write.
__device__ __forceinline__ void prefetch_first_item(const SplitKFlashAttnArgs& args,
                                                    const Ring& ring) {
  const int first = threadIdx.x / 32 * kTaskDepth, lane = threadIdx.x % 32;
  wait_barrier(ring.task_barrier[first], 0);
  const int slot = ring.shared.tasks[first].slot;
  if (slot < 0) return;
  const float2* const rotations = rotations_of(args, ring.shared.tasks[first].length);
  if (rotations && 2 * lane < HEAD_DIM / 2) ptx::touch(rotations + 2 * lane);
  constexpr int kSectors = HEAD_DIM / 16;  // of 32 bytes, which a touch fetches
  if (kHeadNorms && lane < 2 * kSectors)
    ptx::touch((lane < kSectors ? args.q_norm : args.k_norm) + 16 * (lane % kSectors));
}

// The state of a warp from block to block of an item.
struct WarpAttention {
  Accumulators acc;
  Queries queries;
  int length;  // of the slot, with the new token

  __device__ __forceinline__ void reset() { acc.reset(), queries = {}, length = 0; }

  // Attend to one KV block, whose task has the barriers `number` of the ring in phase `parity`.
  __device__ __forceinline__ void attend_block(const SplitKFlashAttnArgs& args, const Ring& ring,
                                               const Task& task, int number, uint32_t parity) {
    const bool begins = task.number == 0, arrives = arrives_for_warp();
    if (begins) length = task.length + 1;
    const int valid = length - (task.first + task.number) * kBlock;
    const bool has_new = valid <= kBlock;
    NewToken token;
    // 1. Queries and the new token: issue all loads before the first use.
    if (begins) queries.load(args, task.slot, task.head);
    if (kPrefixes && begins && task.first > 0 && task.first == args.prefix_blocks[task.slot]) {
      const int64_t head = static_cast<int64_t>(task.slot) * args.kv_heads + task.head;
      acc.load(args.prefixes + head * args.group * kPartial, args.group);
    }
    if (has_new) token.load(args, task, length - 1);
    if (kHeadNorms) {
      if (begins) queries.normalize(args.q_norm, args.norm_eps);
      if (has_new) token.normalize_key(args.k_norm, args.norm_eps);
    }
    if (args.rotations) {
      const float2* const rotations = rotations_of(args, length - 1);
      if (begins) queries.apply_rope(rotations);
      if (has_new) token.apply_rope(rotations);
    }
    // 2. Scores: S = K Q^T, then release the stage of the keys.
    wait_barrier(ring.k_barrier[number], parity);
    if (has_new) token.append_key(smem + task.k_stage * kHalfBytes);
    Scores scores;
    multiply_keys(ring.stage(task.k_stage), queries, scores);
    if (has_new) ptx::fence_proxy_async();  // order append_key() before the next copy
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.k_stage]);
    // 3. Online softmax: probabilities, new row_max and row_sum, rescaled accumulators.
    const Probabilities probabilities(scores, valid, args.scale, acc);
    // 4. Outputs: O^T += V^T P^T, then release the stage of the values.
    wait_barrier(ring.v_barrier[number], parity);
    if (has_new) token.append_value(smem + task.v_stage * kHalfBytes);
    multiply_values(ring.stage(task.v_stage), valid, probabilities, acc);
    if (has_new) ptx::fence_proxy_async();
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.v_stage]);
  }
};

// Wait for the warp's next task. False when there is none; the producer warp has none.
__device__ __forceinline__ bool next_task(const Ring& ring, int tasks_taken) {
  const int warp = ptx::opaque<uint32_t>(threadIdx.x) / 32,
            number = warp * kTaskDepth + tasks_taken % kTaskDepth;
  if (warp == kWarps) return false;
  wait_barrier(ring.task_barrier[number], tasks_taken / kTaskDepth % 2);
  return ring.shared.tasks[number].slot >= 0;
}

// Attention loop of all warps. The producer warp enters it after its last copy, to help combining.
__device__ __forceinline__ void consume(const SplitKFlashAttnArgs& args, const Ring& ring) {
  const Combiner combiner{args, ring.shared};
  WarpAttention item;
  item.reset();
  bool more = next_task(ring, 0);
#pragma unroll 1
  for (int tasks_taken = 0;;) {
    // `partial`: the item is complete, but does not cover its KV head. `combine_now`: it covers
    // whole splits, so no other warp of this CTA is involved.
    bool partial = false, combine_now = false;
    if (more) {
      const int number =
          ptx::opaque<uint32_t>(threadIdx.x) / 32 * kTaskDepth + tasks_taken % kTaskDepth;
      const Task task = ring.shared.tasks[number];
      if (task.number == 0) combiner.begin(task);
      const bool last = task.number + 1 == task.count;
      item.attend_block(args, ring, task, number, tasks_taken / kTaskDepth % 2);
      if (last) {
        const ItemRecord record = combiner.current();
        partial = !record.whole();
        combine_now = partial && record.chunks == 1;
        if (!partial) store(KvHead(args, record), item.acc);
      }
      tasks_taken++;
      if (!combine_now) more = next_task(ring, tasks_taken);
      if (!last) continue;
    }
    if (partial || !more) combiner.finish_item(partial, item.acc, !more);
    item.reset();  // unconditional, which ends the live ranges of its registers
    if (!more) break;
    if (combine_now) more = next_task(ring, tasks_taken);
  }
}

// Two CTAs share an SM, one of this op and one of the next; on 12.x a CTA's ring takes all of an
// SM's shared memory. On 10.0 the largest accumulators would spill with two.
#if __CUDA_ARCH__ >= 1200 || (HEAD_DIM == 128 && GROUP_TILES == 2 && __CUDA_ARCH__ != 900)
constexpr int kCtasOfSm = 1;
#else
constexpr int kCtasOfSm = 2;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtasOfSm)
    splitk_flash_attn(const __grid_constant__ SplitKFlashAttnArgs args) {
  __shared__ Shared shared;
  ptx::launch_dependents();
  if (args.order.number() >= args.tiers[args.tier_count].first_cta) return fill_sm();

  // Setup: ring and records in shared memory.
  const Ring ring(args, shared);
  if (threadIdx.x == 32 * kWarps) ring.initialize();
  if (threadIdx.x < kWarps) shared.records[threadIdx.x].splits_left = 0;
  __syncthreads();

  // Producer warp: copy the cached blocks of the CTA's items. Attention warps: prefetch. Neither
  // reads anything that a predecessor kernel writes.
  if (threadIdx.x / 32 == kWarps) {
    int tier = 0;
    while (tier + 1 < args.tier_count && args.order.number() >= args.tiers[tier + 1].first_cta)
      tier++;
    Producer(ring, args.tiers[tier].window).run(WorkItems(args, tier));
  } else {
    prefetch_first_item(args, ring);
  }

  // Every thread waits, also those that read nothing: completion of this kernel then implies
  // completion of all its predecessors.
  ptx::wait_for_dependencies();

  // All warps: attend and combine.
  consume(args, ring);
}
