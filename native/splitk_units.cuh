// The consumers of SplitK_GEMM for a W of 4 or 8 bits: all 8 warps multiply each group with mma.
//
//   each team of warps has a part of the group's row blocks; its warps divide K:
//     for each stage: wait for it
//       if it has a unit of the warp's share, which is every fourth or eighth one:
//         for each pair of row blocks:
//           for each group of columns: sums = W X^T; acc += scales * sums
//       release it
//   the warps add their sums; warp i has the outputs of pair i
#pragma once

#include "splitk_epilogue.cuh"
#include "splitk_ring.cuh"
#include "splitk_scheduler.cuh"

// Few are left by the scheduler of mixed tiers; by codes of 8 bits with 9 to 16 rows, with zeros, or
// with several scales a unit.
constexpr bool kFewRegisters = kMixes || kCodeBits == 8 && (TILES > 1 || ZEROS || GROUP < kUnitCols);
constexpr int kAtOnce = kFewRegisters ? 2 : 4;
// Unrolled, these would spill.
constexpr bool kRolled = TILES > 1 ? ZEROS : kCodeBits == 4 && SCALE_BYTES * kAtomK / GROUP > 2;
constexpr int kUnrolledAtoms = kRolled ? 1 : kUnitAtoms;
#include "units_multiply.cuh"

constexpr int kNormBarrier = 3;  // after units_multiply.cuh's: all factors are in shared memory

// Every warp waits for every stage and releases it: a barrier only tells of the last copy into its
// stage, so no warp may be left behind by more than a ring.
__device__ __forceinline__ void wait_for(const Ring& ring, const RingPosition& stage) {
  wait_barrier(ring.full_barrier[stage.stage], stage.parity);
  if (ring.windowed) wait_barrier(ring.x_full_barrier[stage.stage], stage.parity);
}
__device__ __forceinline__ void release(const Ring& ring, RingPosition& stage) {
  __syncwarp();
  if (arrives_for_warp()) ptx::mbarrier_arrive(ring.empty_barrier[stage.stage]);
  stage.advance(ring.stages);
}

__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring,
                                        int tier_of_cta, int warp, Moments& moments) {
  const int stage_units = args.tiers[tier_of_cta].stage_atoms / kUnitAtoms;  // 1, 2 or 4
  const int units = args.k / kUnitCols;
  const int shares = TILES == 1 || kCodeBits == 4 ? args.k_shares : kShares;
  RingPosition stage;
  Scheduler at(args, tier_of_cta);
  ptx::wait_for_dependencies();
  if (args.x_squares) {
    moments.add_up(args, warp);
    ptx::named_barrier_sync(kNormBarrier, kConsumers);
  }
  for (; !at.done(); at.next_group()) {
    int first, count;
    divide(shares, at.row_blocks(), first, count);
    Sums sums[kWarpPairs] = {};
    int next = own_share(shares);  // unit of the warp
#pragma unroll 1
    for (int unit = 0; unit < units; unit += stage_units) {
      wait_for(ring, stage);
      // A stage has at most one unit of the warp.
      if (next < min(unit + stage_units, units)) {
        const int own = next - unit;
        const uint8_t* const w = smem + (ring.smem_w(stage.stage) - ptx::smem_address(smem)) +
                                 (own * at.row_blocks() + first) * kUnitBytes;
        const uint32_t x = ring.smem_x(stage.stage) + own * kUnitAtoms * kXAtomBytes;
        next += shares;
        const bool last = next >= units;
#pragma unroll
        for (int i = 0; i < kTileRowBlocks; i += kAtOnce) {
          if (i < count)
            multiply_some<kAtOnce>(count - i, w + i * kUnitBytes, x, last, sums + i / 2);
        }
      }
      release(ring, stage);
    }

    divide(shares, at.row_blocks(), first, count);
    const int share = own_share(shares);
    // Stores the outputs of a pair. Its loads take about as long as the exchange of sums.
    const int own = first + 2 * share, row_block = at.first_row_block + at.row_block + own;
    const Epilogue epilogue(args, row_block * kRowsPerBlock, count - 2 * share);
    Accumulators acc;
    reduce(sums, shares, share, (count + 1) / 2, acc.tile[0]);
    epilogue.store(acc, moments);
  }
}
