// SplitK_GEMM: Y[N, M] = epilogue(X[N, K] W[M, K]^T) for N <= 64, W's rows in several memory tiers.
//
//   grid: one CTA per SM; each tier has CTAs of its own      (tiers by CTA)
//   each CTA of a tier:
//     W producer warp:
//       for each group of row blocks that the scheduler assigns, for each stage along K:
//         if the tier has a congestion window: wait until fewer than `window` stages are in flight
//         wait until the stage is empty
//         bulk-copy the group's W into it, from HBM, host or peer memory alike
//       prefetch W of a later launch into L2
//     X producer warp:
//       wait for the predecessor kernel (PDL): it wrote X
//       for the same stages: wait until empty, copy X by TMA
//     consumers, two warpgroups:
//       for each group:
//         acc = 0
//         for each stage along K: wait until full; acc += W X^T; release the stage
//         halves of K: store_partial; the CTA that arrives second combines both
//         Y = activation(norm scale * acc + bias) + residual
//         with units, ahead of an RMSNorm: also Y * the norm's weight, and sums of Y^2
//
// W is packed as dakrun/formats/packed16.py lays it out. The order in which the terms of an
// output are added depends on the shapes alone, so that tiers and the number of CTAs change no bit
// of Y. A tier's CTAs serve that tier alone, but for mixed tiers (splitk_scheduler.cuh).
//
// Warpgroups: groups of more than 8 row blocks are divided between them, so that X is read once for
// both. Smaller groups they take in turns, one in its epilogue while the other multiplies; with
// TILES == 8, where X is the larger operand, they may have two groups at once. W of fewer bits has
// consumers of its own (splitk_units.cuh).

#include "splitk_combine.cuh"
#include "splitk_epilogue.cuh"
#include "splitk_producer.cuh"
#if CODE
#include "splitk_units.cuh"
#else
#include "gemm_multiply.cuh"

constexpr int kTurnBarrier = 1;  // and 2: where a warpgroup waits for its turn
constexpr int kNormBarrier = 3;  // where they wait for the moments of X

// The consumers.
__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring,
                                        int tier_of_cta, int warp, Moments& moments) {
  constexpr int kWarps = kWarpgroup / 32;
  const int warpgroup = warp / kWarps, other = 1 - warpgroup;
  // The warpgroup's share of a stage. Warpgroup 1 has the second part of a divided group, or the
  // second of two groups.
  const int first = ring.divided ? warpgroup * kTileRowBlocks : 0;
  const int group = ring.shared && !ring.divided ? warpgroup : 0;
  const int warp_row_block = first + warp % kWarps * 2;
  const Tier& tier = args.tiers[tier_of_cta];
  const int stage_atoms = tier.stage_atoms;
  const bool arrives = arrives_for_warp();
  const RingPosition others_group(tier.group_stages, ring.stages);
  RingPosition stage;
  Scheduler at(args, tier_of_cta);
  ptx::wait_for_dependencies();
  for (int turn = 0; !at.done(); at.next_group(), turn++) {
    // Taking turns: skip the stages of the other warpgroup's group.
    if (!ring.shared && turn % kWarpgroups != warpgroup) {
      stage.advance(others_group, ring.stages);
      continue;
    }
    const int row_blocks = kPairs ? max(at.row_blocks(group), 0) : at.row_blocks();
    const int row_block = at.first_row_block + at.row_block + group * at.second + warp_row_block;
    const Epilogue epilogue(args, row_block * kRowsPerBlock, row_blocks - warp_row_block);
    if (!ring.shared && turn > 0) ptx::named_barrier_sync(kTurnBarrier + warpgroup, kConsumers);

    // Main loop over the group's stages.
    const bool normalises = NORM && turn == 0;
    MomentAccumulators moments_of_x(warp % kWarps);
    Accumulators acc;
#if WGMMA  // wgmma is asynchronous: a stage is released when the next stage's products have started
    uint32_t empty_before = 0;  // the barrier of the stage before
#endif
#pragma unroll 1
    for (int left = at.k_stop() - at.k; left > 0; left -= stage_atoms) {
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      if (ring.windowed) wait_barrier(ring.x_full_barrier[stage.stage], stage.parity);
      multiply(ring.smem_w(stage.stage) + group * ring.group_bytes + first * kAtomBytes,
               row_blocks * kAtomBytes, ring.smem_x(stage.stage), min(left, stage_atoms), acc,
               row_blocks - first);
      if (normalises && warpgroup == 0) {
        moments_of_x.add(ring.smem_x(stage.stage), at.k_end - left, min(left, stage_atoms));
      }
#if WGMMA
      wait_but_for_last();
      __syncwarp();
      if (empty_before && arrives) ptx::mbarrier_arrive(empty_before);
      empty_before = ring.empty_barrier[stage.stage];
#else
      __syncwarp();
      if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[stage.stage]);
#endif
      stage.advance(ring.stages);
    }
#if WGMMA
    wait_for(acc);
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(empty_before);
#endif

    // The norm's moments, for this group and all others.
    if (normalises) {
      if (warpgroup == 0) moments_of_x.store(moments);
      ptx::named_barrier_sync(kNormBarrier, ring.shared ? kConsumers : kWarpgroup);
    }
    // Taking turns: the other warpgroup may multiply while this one is in its epilogue.
    if (!ring.shared && !at.last_group()) {
      ptx::named_barrier_arrive(kTurnBarrier + other, kConsumers);
    }
    // Halves of K: only the CTA that arrives second has an output to store.
    if (has_halves(args) && !combine(args, at.k > 0, row_block, row_blocks - warp_row_block, acc))
      continue;
    epilogue.store(acc, moments);
  }
}
#endif

// Two CTAs share an SM, one of this launch and one of the next; on 12.x a CTA's ring takes all of an
// SM's shared memory. With mma and the largest N the registers of two would spill.
#if __CUDA_ARCH__ >= 1200 || (TILES == 8 && !CODE && !WGMMA)
constexpr int kCtasOfSm = 1;
#else
constexpr int kCtasOfSm = 2;
#endif

// Attention may be the next launch: 8 warps of 128 registers a thread. A quarter of an SM has 16,384
// registers, and 2 of those warps beside 3 of this kernel's 10, which may then have 80 a thread: as
// the compiler gives 12 warps. With more, attention waits for SMs to be free, gets the first ones
// twice, and so does the launch behind it. Without this bound are 16 bits, which keep within 80
// anyway but for 33 to 64 normalised rows; units with more than 8 bytes of scales for a row of W;
// and of 9 to 16 rows, mixed tiers, and float32 scales unless a unit of 8-bit codes has one a row.
constexpr bool kUnbounded =
    !CODE || SCALE_BYTES * kUnitCols / GROUP > 8 ||
    (TILES > 1 && (kMixes || (SCALE_BYTES == 4 && (kCodeBits == 4 || GROUP < kUnitCols))));
constexpr int kBoundThreads = kUnbounded ? kThreads : (kThreads + 127) / 128 * 128;

extern "C" __global__ void __launch_bounds__(kBoundThreads, kCtasOfSm)
    splitk_gemm(const __grid_constant__ SplitKGemmArgs args) {
  __shared__ uint64_t barriers[3 * kMaxStages];
  __shared__ Moments moments;
  ptx::launch_dependents();

  // Roles: the tier of this CTA, and the role of this warp.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // uniform, for the compiler
  const int tier_number = tier_of_cta(args);
  const bool idle = args.order.number() >= args.tiers[args.tier_count].first_cta;
  const Tier& tier = args.tiers[tier_number];
  const Ring ring(args, tier, barriers);
  constexpr int kWProducer = kConsumers / 32;  // its warp; the next one is the X producer
  // Every thread waits for the predecessor kernel, even one that reads none of its output: then
  // this kernel's completion implies that of all kernels before it.
  if (idle) return fill_sm();
  const bool produces = warp >= kWProducer && (kWholeWarps || ptx::elect_one());

  // Barriers, and the first copies of W before anything else.
  WProducer w_producer(args, ring, tier_number);
  const bool fills = produces && warp == kWProducer;
  if (fills && is_copying_thread()) ring.initialize_full();
  sync_checked();
  if (fills) {
    w_producer.fill_ring(min(tier.window, tier.stages));
  } else if (produces && is_copying_thread()) {
    ptx::prefetch_tensor_map(&args.x);
    ring.initialize_empty();
  }
  __syncthreads();

  if (warp < kWProducer) {
    consume(args, ring, tier_number, warp, moments);
  } else if (produces && warp > kWProducer) {
    XProducer x_producer(args, ring, tier_number);
    ptx::wait_for_dependencies();
    x_producer.run();
  } else {
    if (produces) {
      w_producer.run();
      w_producer.look_ahead(args);
    }
    ptx::wait_for_dependencies();
  }
}
