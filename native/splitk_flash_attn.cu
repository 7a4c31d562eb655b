// Decode attention: a new token of every slot attends to the slot's cached keys and values, which
// lie in several memory tiers, and to its own, which are appended to the cache.
//
// A slot's cache is [KV heads][blocks of 64 positions][keys, values], each [64][HEAD_DIM] elements,
// the chunks of a row swizzled (swizzle_of) so that matrix loads find no two in the same bank. Keys
// and values of blocks, one copy each of what is filled, go through a ring of stages, so that of a
// last block nothing else is read. A block is one warp's, which keeps a
// softmax (Milakov, Gimelshein 2018; FlashAttention-2, arXiv 2307.08691) for all query heads of a
// KV head at once: keys and values are the A operands, queries and probabilities the B operands, so
// that the tensor cores read them once for a group.
//
// A KV head of a slot is one CTA's, or some CTAs' if there are few, each of which has units of it.
// What a warp computes, an item, is a part of a unit; the warps of a CTA are at different items, so
// that one's loads and stores hide behind the others' work. Units and parts depend on what a cache
// has room for and a slot's length, and their results are added up in order, so neither tiers nor
// batches nor CTAs change a bit. A tier's CTAs share its units so that each reads as many blocks;
// slots of several tiers that the same CTAs read take turns head by head.

#include "attention_merge.cuh"
#include "attention_operands.cuh"
#include "attention_producer.cuh"
#include "attention_softmax.cuh"

// Has what a warp needs of its first item brought near, but for what the kernels before write.
__device__ __forceinline__ void look_ahead(const SplitKFlashAttnArgs& args, const Ring& ring) {
  const int first = threadIdx.x / 32 * kDepth, lane = threadIdx.x % 32;
  wait_barrier(ring.task_barrier[first], 0);
  const int slot = ring.shared.tasks[first].slot;
  if (slot < 0) return;
  const float2* const rotations = rotations_of(args, args.lengths[slot]);
  if (rotations && 2 * lane < HEAD_DIM / 2) ptx::touch(rotations + 2 * lane);
}

// What a warp keeps from block to block of an item.
struct Attended {
  State state;
  Queries queries;
  int length;  // of the slot, with the new token

  __device__ __forceinline__ void reset() { state.reset(), queries = {}, length = 0; }

  // With the barriers `number` of the ring, at their phase of `parity`.
  __device__ __forceinline__ void add(const SplitKFlashAttnArgs& args, const Ring& ring,
                                      const Task& task, int number, uint32_t parity) {
    const bool begins = task.number == 0, arrives = arrives_for_warp();
    if (begins) length = args.lengths[task.slot] + 1;
    const int valid = length - (task.first + task.number) * kBlock;
    const bool has_new = valid <= kBlock;
    NewToken token;
    // All that is to be read is asked for before any of it is used.
    if (begins) queries.load(args, task.slot, task.head);
    if (has_new) token.load(args, task, length - 1);
    if (args.rotations) {
      const float2* const rotations = rotations_of(args, length - 1);
      if (begins) queries.turn(rotations);
      if (has_new) token.turn(rotations);
    }
    wait_barrier(ring.k_barrier[number], parity);
    if (has_new) token.put_keys(smem + task.k_stage * kHalfBytes);
    Scores scores;
    multiply_keys(ring.stage(task.k_stage), queries, scores);
    if (has_new) ptx::fence_proxy_async();  // before the next copy into the stage
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.k_stage]);
    const Weights weights(scores, valid, args.scale, state);
    wait_barrier(ring.v_barrier[number], parity);
    if (has_new) token.put_values(smem + task.v_stage * kHalfBytes);
    multiply_values(ring.stage(task.v_stage), valid, weights, state);
    if (has_new) ptx::fence_proxy_async();
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[task.v_stage]);
  }
};

// Waits for what a warp is told of its next block; whether there is one.
__device__ __forceinline__ bool told(const Ring& ring, int taken) {
  const int warp = ptx::anew<uint32_t>(threadIdx.x) / 32, number = warp * kDepth + taken % kDepth;
  if (warp == kWarps) return false;
  wait_barrier(ring.task_barrier[number], taken / kDepth % 2);
  return ring.shared.tasks[number].slot >= 0;
}

// All warps; that which copies comes when it has nothing more to copy.
__device__ __forceinline__ void consume(const SplitKFlashAttnArgs& args, const Ring& ring) {
  const Meeting meeting{args, ring.shared};
  Attended item;
  item.reset();
  bool more = told(ring, 0);
#pragma unroll 1
  for (int taken = 0;;) {
    // Whether others attend to more of the item, which is now complete; and only in other CTAs.
    bool holds = false, at_once = false;
    if (more) {
      const int number = ptx::anew<uint32_t>(threadIdx.x) / 32 * kDepth + taken % kDepth;
      const Task task = ring.shared.tasks[number];
      if (task.number == 0) meeting.hold(task);
      const bool last = task.number + 1 == task.count;
      item.add(args, ring, task, number, taken / kDepth % 2);
      if (last) {
        const Held held = meeting.held();
        holds = !held.whole();
        at_once = holds && held.parts == 1;
        if (!holds) store(Row(args, held), item.state);
      }
      taken++;
      if (!at_once) more = told(ring, taken);
      if (!last) continue;
    }
    if (holds || !more) meeting.hand_over(holds, item.state, !more);
    item.reset();  // in any case, so the compiler sees that nothing need be kept meanwhile
    if (!more) break;
    if (at_once) more = told(ring, taken);
  }
}

// Two CTAs to an SM, that of this op and that of the next; elsewhere the largest states would
// spill.
#if HEAD_DIM == 128 && (__CUDA_ARCH__ == 1200 || (GROUP_TILES == 2 && __CUDA_ARCH__ != 900))
constexpr int kCtasOfSm = 1;
#else
constexpr int kCtasOfSm = 2;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtasOfSm)
    splitk_flash_attn(const __grid_constant__ SplitKFlashAttnArgs args) {
  __shared__ Shared shared;
  ptx::launch_dependents();
  if (args.order.number() >= args.tiers[args.tier_count].first_cta) return fill_sm();
  const Ring ring(args, shared);
  const bool copies = threadIdx.x / 32 == kWarps;
  if (threadIdx.x == 32 * kWarps) ring.initialize();
  if (threadIdx.x < kWarps) shared.held[threadIdx.x].left = 0;
  __syncthreads();
  if (copies) {
    int tier = 0;
    while (tier + 1 < args.tier_count && args.order.number() >= args.tiers[tier + 1].first_cta)
      tier++;
    Producer(ring, args.tiers[tier].window).run(Items(args, tier));
  } else {
    look_ahead(args, ring);
  }
  // Every thread waits, also those that read nothing: that this kernel is complete then implies
  // that those before it are, at any distance.
  ptx::wait_for_dependencies();
  consume(args, ring);
}
