// Prompt attention: several queries per request over the KV cache, causal, with an online softmax
// as in FlashAttention-2 (arXiv 2307.08691) and roles of warps as in FlashAttention-3 (2407.08608).
//
// Keys and values of all positions, the queries' own included, lie in KV blocks, which block tables
// find (dakrun/kernels/attention/kv_blocks.py). Rows of a tile are (query, query head of one KV
// head), so that a group's heads share what is read: a part of a tile has 64 / group queries.
//
//   for each CTA, one per SM; its items are (tile of queries, range of KV blocks, KV head):
//     producer warps, four; each has every second block's keys, or values:
//       for each item, for each KV block of the range:
//         wait until the stage is empty; copy rows into panels of 64 dimensions, zeros past the
//         stored positions; announce the stage once the copies have landed
//     consumers, two warpgroups, each for its part of the tile:
//       for each item:
//         Q = queries, in registers
//         for each KV block that the part sees:
//           S = Q K^T;  P, row_max, row_sum = online_softmax(mask(S));  O += P V
//           where O += P V of a block runs beside the next block's softmax
//         one range: store O / row_sum
//         else: store_partial; the last range to arrive combines them, in order
//
// An item of few queries has one part only; the warpgroups take such items in turn. How positions
// are divided into ranges follows from the request alone, so no bit depends on the other requests
// or the number of CTAs.

#include "prompt_merge.cuh"
#include "prompt_producer.cuh"

// Attend from a part to its blocks. `at` is the stage of the first block's keys.
__device__ __forceinline__ void attend(const PromptAttnArgs& args, const Ring& ring,
                                       const WorkItems& items, const Part& part, RingPosition at,
                                       Accumulators& acc) {
  Queries queries;
  load_queries(args, items, part, queries);
  acc.reset();
  float2 scores[kScores];
  Probabilities probabilities;
  float factors[2];
  // Last position that the thread's rows see, counted from the current block on.
  const int first = items.tile.first_block * kBlock;
  int last[2] = {items.tile.position + part.query[0] - first,
                 items.tile.position + part.query[1] - first};
  int unmasked = items.tile.position + part.first_query - first;  // the same of the part's first

  ring.wait_full(at);
  start_scores(queries, ring.stage(at.stage), scores);
  wait_for(scores);
  ring.release(at);
  if (unmasked < kBlock - 1) mask(last, scores);
  softmax(args.scale, scores, acc, factors);
  pack(scores, probabilities);
#pragma unroll 1
  for (int block = 1; block < part.blocks; block++) {
    RingPosition values = at, keys = at;
    values.advance(kStages);
    keys.advance(RingPosition(2, kStages), kStages);
    ring.wait_full(keys);
    start_scores(queries, ring.stage(keys.stage), scores);
    ring.wait_full(values);
    start_outputs(probabilities, ring.stage(values.stage), acc.outputs);
    wait_but_for_last(scores);
    ring.release(keys);
    last[0] -= kBlock, last[1] -= kBlock, unmasked -= kBlock;
    if (unmasked < kBlock - 1) mask(last, scores);
    softmax(args.scale, scores, acc, factors);
    compute_now(acc.row_sum, ring.first);
    wait_for(acc.outputs);
    ring.release(values);
    // Most blocks leave row_max as it is.
    if (__ballot_sync(0xffffffff, factors[0] != 1.0f || factors[1] != 1.0f)) acc.rescale(factors);
    pack(scores, probabilities);
    at = keys;
  }
  at.advance(kStages);
  ring.wait_full(at);
  start_outputs(probabilities, ring.stage(at.stage), acc.outputs);
  wait_for(acc.outputs);
  ring.release(at);
}

// The consumers.
__device__ __forceinline__ void consume(const PromptAttnArgs& args, const Ring& ring,
                                        Shared& shared, int warpgroup) {
  RingPosition at;  // of the item's first stage
  for (WorkItems items(args); items.next();) {
    const int number = (warpgroup + items.round) % kParts;
    const Part part(args, items.tile, number);
    Accumulators acc;
    if (part.blocks > 0) {
      attend(args, ring, items, part, at, acc);
    } else {
      acc.reset();
    }
    at.advance(RingPosition(2 * part.blocks, kStages), kStages);
    for (int left = 2 * (items.tile.blocks - part.blocks); left > 0; left--) {
      ring.wait_full(at);
      ring.release(at);
      at.advance(kStages);
    }
    if (part.rows > 0) finish(args, items, part, number, shared, acc);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    prompt_attn(const __grid_constant__ PromptAttnArgs args) {
  __shared__ Shared shared;
  ptx::launch_dependents();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // uniform, for the compiler
  const Ring ring(shared);
  if (threadIdx.x == 0) ring.initialize();
  __syncthreads();
  ptx::wait_for_dependencies();
  if (warp < kConsumers / 32) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume(args, ring, shared, warp / (kWarpgroup / 32));
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    Producer(args, ring, warp - kConsumers / 32).run();
  }
}
