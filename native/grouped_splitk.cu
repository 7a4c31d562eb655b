// Grouped SplitK_GEMM: products of few rows with the matrices of the experts that they chose, which
// are stacked, expert after expert, in several memory tiers. With -DOUTPUTS=0 it gates, with
// -DOUTPUTS=1 it adds up the experts of each token, with -DOUTPUTS=2 it does neither:
//
//   y[pair] = silu(gate W x[token of the pair]) * (up W x[token of the pair])
//   y[token] += sum over the token's pairs of weight of the pair * W x[pair]
//   y[pair] = W x[pair]
//
//   grid: one CTA per SM; each tier has CTAs of its own
//   each CTA:
//     list the experts that any row chose, with their first pairs (native/route.cu writes `ends`)
//     its items: the chosen experts' row blocks in its tier, one expert after the other, are divided
//       evenly over the tier's CTAs; an item is up to 16 of them (8 where warpgroups take turns) in
//       one stored group, or if K is one unit up to 64, and up to 8 * TILES rows of the expert
//     W producer warp:  for each item, for each stage along K: wait for the congestion window and an
//                       empty stage; copy W
//     X producer warp:  wait for the predecessor kernel; for the same stages, copy the rows of X
//     consumers, 8 warps of two row blocks each (with units: units_multiply.cuh):
//       for each item, with -DOUTPUTS=1 and no units the two warpgroups in turns:
//         acc = 0; for each stage: acc += W X^T
//         gate:  y = silu(gate) * up
//         down:  store weight * acc; the last one to arrive of a token's experts adds them up
//
// Only experts that a row chose are read; the host does not know which. Sums along K and over
// experts have one order, so that no bit depends on tiers, CTAs or other rows.
//
// PDL: the gating launch waits for the router before anything else, and lets its successor start
// after that. So the list is complete when the launch that adds up starts: this launch reads the
// list and W ahead of its own wait, as does one that stores products by a list that is given.

#include "grouped_splitk_epilogue.cuh"
#include "grouped_splitk_producer.cuh"
#if CODE
constexpr bool kFewRegisters = true;  // items of a list take some
constexpr int kAtOnce = TILES == 1 ? 4 : 2;
constexpr int kUnrolledAtoms = ZEROS && GROUP < kAtomK ? 1 : kUnitAtoms;
#include "units_multiply.cuh"
#else
#include "gemm_multiply.cuh"
#endif

__device__ __forceinline__ void wait_for(const Ring& ring, const RingPosition& stage) {
  wait_barrier(ring.w_full[stage.stage], stage.parity);
  wait_barrier(ring.x_full[stage.stage], stage.parity);
}
__device__ __forceinline__ void release(const Ring& ring, RingPosition& stage) {
  __syncwarp();
  if (arrives_for_warp()) ptx::mbarrier_arrive(ring.empty[stage.stage]);
  stage.advance(ring.stages);
}

__device__ __forceinline__ void store(const Outputs& outputs, const Accumulators& acc) {
  if (kGates) {
    outputs.store_gated(acc);
  } else if (kAdds) {
    outputs.add(acc);
  } else {
    outputs.store(acc);
  }
}

#if CODE
// The consumers of units (units_multiply.cuh).
__device__ __forceinline__ void consume(const GroupedSplitKArgs& args, const Ring& ring,
                                        const Chosen& chosen, int own_tier) {
  RingPosition stage;
  // A K of one unit has no shares: each warp multiplies the pairs of row blocks that it stores.
  const bool one_unit = args.atoms == kUnitAtoms;
  const int step = one_unit ? 1 : kShares;
  for (Items at(args, chosen, own_tier); !at.done(); at.next()) {
    int first, count;
    if (one_unit) {
      const int each = (at.row_blocks + 2 * kWarps - 1) / (2 * kWarps) * 2;
      first = ptx::opaque<uint32_t>(threadIdx.x) / 32 * each;
      count = min(each, at.row_blocks - first);
    } else {
      divide(kShares, at.row_blocks, first, count);
    }
    Sums sums[kWarpPairs] = {};
    for (int unit = 0; unit < args.atoms / kUnitAtoms; unit += at.stage_atoms / kUnitAtoms) {
      wait_for(ring, stage);
      const int units = min(at.stage_atoms / kUnitAtoms, args.atoms / kUnitAtoms - unit);
#pragma unroll 1
      for (int i = (own_share(step) - unit) & (step - 1); i < units; i += step) {
        const uint8_t* const w = smem + (ring.smem_w(stage.stage) - ptx::smem_address(smem)) +
                                 (i * at.row_blocks + first) * kUnitBytes;
        const uint32_t x = ring.smem_x(stage.stage) + i * kUnitAtoms * kAtomK * 2;
        const bool last = unit + i + step >= args.atoms / kUnitAtoms;
#pragma unroll
        for (int j = 0; j < kTileRowBlocks; j += kAtOnce) {
          if (j < count)
            multiply_some<kAtOnce, PaddedX>(count - j, w + j * kUnitBytes, x, last, sums + j / 2);
        }
      }
      release(ring, stage);
    }
    Accumulators acc;
    if (one_unit) {
#pragma unroll
      for (int pair = 0; pair < kOneUnitRowBlocks / (2 * kWarps); pair++) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++)
          acc.tile[0][i] = sums[pair][i];
        if (2 * pair < count)
          store(Outputs(args, at, first + 2 * pair, count - 2 * pair), acc);
      }
    } else {
      const int share = own_share(kShares);
      reduce(sums, kShares, share, (count + 1) / 2, acc.tile[0]);
      store(Outputs(args, at, first + 2 * share, count - 2 * share), acc);
    }
  }
}
#else
constexpr int kTurnBarrier = 1;  // and 2: where a warpgroup waits for its turn

// The consumers of 16 bits: each warp has two of the row blocks.
__device__ __forceinline__ void consume(const GroupedSplitKArgs& args, const Ring& ring,
                                        const Chosen& chosen, int own_tier) {
  const int warpgroup = threadIdx.x / kWarpgroup, half = kTurns ? 0 : warpgroup;
  const int first = half * kTileRowBlocks + threadIdx.x % kWarpgroup / 32 * 2;
  RingPosition stage;
  int turn = 0;
  // A barrier only tells of the last copy into its stage, so a warpgroup waits for the other's.
  const auto wait_for_turn = [&] {
    if (kTurns && turn > 0) ptx::named_barrier_sync(kTurnBarrier + warpgroup, kConsumers);
  };
  for (Items at(args, chosen, own_tier); !at.done(); at.next(), turn++) {
    if (kTurns && turn % kWarpgroups != warpgroup) {
      for (int left = args.atoms; left > 0; left -= at.stage_atoms)
        stage.advance(ring.stages);
      continue;
    }
    const int own = at.row_blocks - first;
    const Outputs outputs(args, at, first, own);
    Accumulators acc;
    wait_for_turn();
#pragma unroll 1
    for (int left = args.atoms; left > 0; left -= at.stage_atoms) {
      wait_for(ring, stage);
      if (own > 0) {
        multiply<PaddedX>(ring.smem_w(stage.stage) + half * kTileRowBlocks * kAtomBytes,
                          at.row_blocks * kAtomBytes, ring.smem_x(stage.stage),
                          min(left, at.stage_atoms), acc);
      }
      release(ring, stage);
    }
    if (kTurns) ptx::named_barrier_arrive(kTurnBarrier + 1 - warpgroup, kConsumers);
    if (own > 0) store(outputs, acc);
  }
  if (turn % kWarpgroups == warpgroup) wait_for_turn();  // no arrival is left at a barrier
}
#endif

#if __CUDA_ARCH__ >= 1200 || (TILES == 8 && !CODE && __CUDA_ARCH__ == 1000)
// The ring takes all of an SM's shared memory; on 10.0 the registers of two CTAs would spill.
constexpr int kCtasOfSm = 1;
#else
constexpr int kCtasOfSm = 2;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtasOfSm)
    grouped_splitk(const __grid_constant__ GroupedSplitKArgs args) {
  __shared__ uint64_t barriers[3 * kMaxStages];
  __shared__ Chosen::Range ranges[kMaxTiers];
  constexpr int kWProducer = kConsumers / 32;  // its warp; the next one is the X producer
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // uniform, for the compiler
  const int own_tier = tier_of_cta(args);
  const bool idle = args.order.number() >= args.tiers[args.tier_count].first_cta;
  const Ring ring(args, barriers);
  const Chosen chosen{Ring::list(), ranges};
  if (threadIdx.x == kThreads - 1) ring.initialize();
  // Tables that are read first, by all: a line has 16 numbers.
  if (threadIdx.x == 0) ptx::prefetch(args.addresses);
  if (args.shifts != nullptr && threadIdx.x * 16 < args.experts)
    ptx::prefetch(args.shifts + threadIdx.x * 16);
  // Only behind the router's end may a successor start that reads its list.
  if (kGates) ptx::wait_for_dependencies();
  ptx::launch_dependents();
  if (idle) return fill_sm();
  if (warp == kWProducer) chosen.list(args);
  __syncthreads();

  if (warp < kWProducer) {
    ptx::wait_for_dependencies();
    consume(args, ring, chosen, own_tier);
  } else if (warp == kWProducer) {
    produce_w(args, ring, chosen, own_tier);
    ptx::wait_for_dependencies();
  } else {
    ptx::wait_for_dependencies();
    produce_x(args, ring, chosen, own_tier);
  }
}
