// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for N <= 64, the rows of W lying in several memory tiers.
//
// W is packed (dakrun/kernels/packing.py) in row blocks of 8 rows, each of which lies in one tier.
// A CTA computes rows in groups of row blocks: whole ones, or for many rows of X halves of sums
// that depend on the shapes alone (gemm_halves.cuh). The order of a sum's terms thus depends on
// neither tiers nor the number of CTAs, and they change no bit of Y.
//
// A CTA serves one tier, or in turns two: where a link needs no window, what little lies behind it
// is read by all SMs, so that none is missing where HBM is read. A thread, or a warp as one, keeps
// copies of W in flight into a ring of stages, another those of X, and two warpgroups multiply. Of
// groups of more than 8 row blocks each takes its part, so that X is read once for both; smaller
// ones they take in turns, one storing while the other multiplies, or two at once, where that X is
// read once for both counts for more.

#include "gemm_epilogue.cuh"
#include "gemm_halves.cuh"
#include "gemm_multiply.cuh"
#include "splitk_producer.cuh"

constexpr int kTurnBarrier = 1;  // and the next: where warpgroups wait for their turn
constexpr int kNormBarrier = 3;  // where they wait for the moments of X

__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring, int number,
                                        int warp, Moments& moments) {
  constexpr int kWarps = kWarpgroup / 32;
  const int warpgroup = warp / kWarps, other = 1 - warpgroup;
  const int first = ring.split ? warpgroup * kTileRowBlocks : 0;
  const int group = ring.shared && !ring.split ? warpgroup : 0;
  const int warp_row_block = first + warp % kWarps * 2;
  const Tier& tier = args.tiers[number];
  const int stage_atoms = tier.stage_atoms;
  const bool arrives = arrives_for_warp();
  // Where a group of the other warpgroup leaves the ring.
  const RingPosition others(tier.group_stages, ring.stages);
  RingPosition stage;
  Cursor at(args, number);
  ptx::wait_for_dependencies();
  for (int turn = 0; !at.done(); at.next_group(), turn++) {
    if (!ring.shared && turn % kWarpgroups != warpgroup) {
      stage.advance(others, ring.stages);
      continue;
    }
    const int row_blocks = kPairs ? max(at.row_blocks(group), 0) : at.row_blocks();
    const int row_block = at.first_row_block + at.row_block + group * at.second + warp_row_block;
    const Outputs outputs(args, row_block * kRowsPerBlock, row_blocks - warp_row_block);
    if (!ring.shared && turn > 0) ptx::named_barrier_sync(kTurnBarrier + warpgroup, kConsumers);
    const bool normalises = NORM && turn == 0;
    RowSums of_x(warp % kWarps);
    Sums sums;
#if WGMMA  // products go on behind multiply(): a stage is free when those of the next one do
    uint32_t before = 0;  // the barrier of the stage before, to be freed
#endif
#pragma unroll 1
    for (int left = at.end() - at.k; left > 0; left -= stage_atoms) {
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      if (ring.windowed) wait_barrier(ring.x_barrier[stage.stage], stage.parity);
      multiply(ring.w(stage.stage) + group * ring.group_bytes + first * kAtomBytes,
               row_blocks * kAtomBytes, ring.x(stage.stage), min(left, stage_atoms), sums);
      if (normalises && warpgroup == 0) {
        of_x.add(ring.x(stage.stage), at.k_end - left, min(left, stage_atoms));
      }
#if WGMMA
      wait_but_for_last();
      __syncwarp();
      if (before && arrives) ptx::mbarrier_arrive(before);
      before = ring.empty_barrier[stage.stage];
#else
      __syncwarp();
      if (arrives) ptx::mbarrier_arrive(ring.empty_barrier[stage.stage]);
#endif
      stage.advance(ring.stages);
    }
#if WGMMA
    wait_for(sums);
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(before);
#endif
    if (normalises) {
      if (warpgroup == 0) of_x.store(moments);
      ptx::named_barrier_sync(kNormBarrier, ring.shared ? kConsumers : kWarpgroup);
    }
    if (!ring.shared && !at.last_group()) {
      ptx::named_barrier_arrive(kTurnBarrier + other, kConsumers);
    }
    if (has_halves(args) &&
        !add_halves(args, at.k > 0, row_block, row_blocks - warp_row_block, sums))
      continue;
    outputs.put(sums, moments);
  }
}

// Two CTAs to an SM, that of this op and that of the next; elsewhere the largest N would spill.
#if X_TILES == 8 && !WGMMA
constexpr int kCtasOfSm = 1;
#else
constexpr int kCtasOfSm = 2;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtasOfSm)
    splitk_gemm(const __grid_constant__ SplitKGemmArgs args) {
  __shared__ uint64_t barriers[3 * kMaxStages];
  __shared__ Moments moments;
  ptx::launch_dependents();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the compiler sees it is uniform
  const int number = tier_of_cta(args);
  const bool idle =
      args.order.number() >= args.tiers[args.tier_count].first_cta;  // it only fills an SM
  const Tier& tier = args.tiers[number];
  const Ring ring(args, tier, barriers);
  // Every thread waits for the kernels before, also those that read nothing of theirs: that this
  // kernel is complete then implies that those before it are, at any distance.
  if (idle) return fill_sm();
  const bool copies = warp >= kConsumers / 32 && (kWholeWarps || ptx::elect_one());
  Producer producer(args, ring, number);
  if (copies && warp == kConsumers / 32) {
    if (copies_for_warp()) ring.initialize_w();
    producer.fill_ring(min(tier.window, tier.stages));
  } else if (copies && copies_for_warp()) {
    ptx::prefetch_tensor_map(&args.x);
    ring.initialize_x();
  }
  __syncthreads();
  if (warp < kConsumers / 32) {
    consume(args, ring, number, warp, moments);
  } else if (copies && warp > kConsumers / 32) {
    XLoader x(args, ring, number);
    ptx::wait_for_dependencies();
    x.run();
  } else {
    if (copies) {
      producer.run();
      producer.look_ahead(args);
    }
    ptx::wait_for_dependencies();
  }
}
