// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for many rows of X, the rows of W lying in several tiers.
//
// W is packed as SplitK_GEMM reads it (dakrun/kernels/packing.py). A CTA serves one tier and
// computes tiles, one after the other: two warpgroups multiply 64 rows of W and up to 256 of X
// each, or the other way round, beside each other along W or along X. A warp keeps copies of W in
// flight into a ring of stages, another those of X. CTAs of a cluster share W or X, which each of
// them then brings a part of, or sum segments of K, of which there are as many as shapes and the
// GPU make it. In a segment sums go in one order, and then those of segments, so that no bit of Y
// depends on tiers, tiles or the number of CTAs.

#include "gemm_multiply.cuh"
#include "tiled_sums.cuh"

static_assert(WGMMA || X_TILES <= 8 && !WIDE, "with more, operands of mma would spill");

// Shared memory: outputs on their way, then stages, each W [row blocks][8 rows][128 bytes] and X
// [rows][128 bytes], 64 columns of both.
struct Ring {
  Barriers full_barrier;   // [stages]: W and X have landed
  Barriers empty_barrier;  // [stages]: all warps that multiply are done with it, in all sharers
  uint32_t first;
  int stages, w_bytes, stage_bytes;
  int sharers, first_sharer;

  __device__ __forceinline__ Ring(const TiledGemmArgs& args, const TierTiles& tier,
                                  const Place& place, uint64_t* barriers)
      : full_barrier{in_register(ptx::smem_address(barriers))},
        empty_barrier{full_barrier[kMaxStages]},
        first(in_register(ptx::smem_address(smem)) + kWarps * args.blocks * kBlockBytes),
        stages(tier.stages),
        w_bytes(tier.tile_row_blocks * kAtomBytes),
        stage_bytes(w_bytes + (kWarpgroups + 1 - tier.row_groups) * kXAtomBytes),
        sharers(place.sharers),
        first_sharer(place.first_sharer) {}

  // By a thread of every warp: one alone would take a while.
  __device__ __forceinline__ void initialize(int warp) const {
#pragma unroll 1
    for (int i = warp; i < stages; i += kTiledThreads / 32) {
      ptx::mbarrier_init(full_barrier[i], 2);
      ptx::mbarrier_init(empty_barrier[i], kWarps * (sharers > 1 ? sharers : kArrivalsOfWarp));
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t w(int stage) const { return first + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t x(int stage) const { return w(stage) + w_bytes; }

  // By a warp that is done with a stage, whose barrier is given.
  __device__ __forceinline__ void release(uint32_t empty) const {
    __syncwarp();
    if (sharers == 1) {
      if (arrives_for_warp()) ptx::mbarrier_arrive(empty);
    } else if (threadIdx.x % 32 < sharers) {
      ptx::mbarrier_arrive_cluster(empty, first_sharer + threadIdx.x % 32);
    }
  }
};

// Until all CTAs of the cluster have come here, whose writes need not be seen.
__device__ __forceinline__ void cluster_meet() {
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

// Before anything is read that the kernels before wrote, or written.
__device__ __forceinline__ void wait_for_input(const TiledGemmArgs& args) {
  if (args.order == kAfterRemote) return;
  ptx::wait_for_dependencies();
  if (args.order == kBeforeLocal) ptx::launch_dependents();
}

// By warps that copy, when they have done so for a tile: its segments may meet where the stages
// are.
__device__ __forceinline__ void pass_segments(const TiledGemmArgs& args, const Tiles& tile,
                                              const SegmentBarriers& barriers) {
  if (args.k_ctas > 1 && !tile.last()) wait_barrier(barriers.added(), tile.parity());
}

// By a whole warp: lane i copies row block i of a tile, and those that lie behind it in its group.
__device__ __forceinline__ void load_w(const TiledGemmArgs& args, const Ring& ring,
                                       const Place& place, const SegmentBarriers& barriers) {
  const TierTiles& tier = args.tiers[place.tier];
  const int lane = threadIdx.x % 32, last = args.tiers[place.tier + 1].first_row_block - 1;
  const int window = tier.window < ring.stages ? tier.window : 1 << 30;
  const bool shares = args.x_ctas > 1;
  const int turns = args.x_ctas - 1, turn = shares ? place.sharer : 0;
  const uint64_t policy = ptx::l2_policy(tier.x_tiles == 1);
  RingPosition fill, landed;
  int issued = 0;
  for (Tiles tile(args, place); tile.next();) {
    const RowBlock row_block(args.weight,
                             min(tile.row_block + min(lane, max(tile.row_blocks, 1) - 1), last));
    const bool copies = lane < tile.row_blocks && (lane == 0 || row_block.place == 0);
    const int bytes =
        min(tile.row_blocks - lane, row_block.group_row_blocks - row_block.place) * kAtomBytes;
    RowBlockAtoms atoms(row_block, min(tile.k, args.weight.atoms - 1));
#pragma unroll 1
    for (int k = tile.k; k < tile.k_end; k++, issued++, atoms.next()) {
      if (issued >= window) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(ring.stages);
      }
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      const uint32_t barrier = ring.full_barrier[fill.stage];
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, tile.row_blocks * kAtomBytes);
      __syncwarp();
      if (copies && (k & turns) == turn) {
        const uint32_t to = ring.w(fill.stage) + lane * kAtomBytes;
        if (shares) {
          ptx::bulk_load_multicast(to, atoms.from, bytes, barrier, place.mask());
        } else {
          ptx::bulk_load_kept(to, atoms.from, bytes, barrier, policy);
        }
      }
      fill.advance(ring.stages);
    }
    pass_segments(args, tile, barriers);
  }
}

// By a whole warp, of which one thread copies. What a box has beyond X is zero, and slow to come.
__device__ __forceinline__ void load_x(const TiledGemmArgs& args, const Ring& ring,
                                       const Place& place, const SegmentBarriers& barriers) {
  const int most = kWarpgroups + 1 - args.tiers[place.tier].row_groups;
  const bool shares = args.w_ctas > 1, copies = ptx::elect_one();
  const int part = shares ? args.box_rows * place.sharer : 0;
  const int box_bytes = args.w_ctas * args.box_rows * kAtomK * 2;
  RingPosition fill;
  for (Tiles tile(args, place); tile.next();) {
    if (tile.first()) wait_for_input(args);
    const int boxes = max(0, min(most, (args.n - tile.n + kXRows - 1) / kXRows));
    if (copies) {
#pragma unroll 1
      for (int k = tile.k; k < tile.k_end; k++) {
        wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
        const uint32_t barrier = ring.full_barrier[fill.stage];
        ptx::mbarrier_arrive_expect_tx(barrier, boxes * box_bytes);
        uint32_t to = ring.x(fill.stage) + part * kAtomK * 2;
#pragma unroll 1
        for (int i = 0, n = tile.n + part; i < boxes; i++, n += kXRows, to += kXAtomBytes) {
          if (shares) {
            ptx::tensor_load_multicast(to, &args.x, k * kAtomK, n, 0, barrier, place.mask());
          } else {
            ptx::tensor_load(to, &args.x, k * kAtomK, n, 0, barrier);
          }
        }
        fill.advance(ring.stages);
      }
    }
    pass_segments(args, tile, barriers);
  }
}

// By a warpgroup that has nothing to multiply.
__device__ __forceinline__ void pass_stages(int count, const Ring& ring, RingPosition& stage) {
  for (; count > 0; count--) {
    wait_barrier(ring.full_barrier[stage.stage], stage.parity);
    ring.release(ring.empty_barrier[stage.stage]);
    stage.advance(ring.stages);
  }
}

// Puts a tile's sums, or what has been given of its segments, on the way to Y.
template <class From, class What>
__device__ __forceinline__ void put(const TiledGemmArgs& args, From& from, const What& what) {
  const Way way = way_of(args);
  if (way == kGated) return from.template put<kGated>(what);
  if (way == kWithResidual) return from.template put<kWithResidual>(what);
  from.template put<kAsTheyAre>(what);
}

__device__ __forceinline__ void consume(const TiledGemmArgs& args, const Ring& ring,
                                        const Place& place, const SegmentBarriers& barriers,
                                        int warpgroup) {
  Blocks blocks(args);
  RingPosition stage;
  SegmentParities parities;
  // What other CTAs arrive at is initialised.
  if (args.k_ctas > 1 && place.sharers == 1) ptx::cluster_wait();
  for (Tiles tile(args, place); tile.next();) {
    if (tile.first()) wait_for_input(args);
    const TilePart part(args, tile, warpgroup);
    if (!part.exists()) {
      pass_stages(tile.k_end - tile.k, ring, stage);
      if (args.k_ctas > 1) {
        Segments segments(args, place, barriers, ring.first, parities);
        segments.drain();
        segments.pass_on(tile.last());
      }
      continue;
    }
    const uint32_t of_w = (part.row_block - tile.row_block) * kAtomBytes,
                   of_x = (part.n - tile.n) * kAtomK * 2;
    const TileOutputs outputs(args, part, blocks, tile.leaves, first_pass(args, place));
    Sums sums;
    take_sums(args, place.sharers, tile.carried, sums);
#if WGMMA  // products go on behind multiply(): a stage is free when those of the next one do
    uint32_t before = 0;  // the barrier of the stage before, to be freed
#endif
#pragma unroll 1
    for (int left = tile.k_end - tile.k; left > 0; left--) {
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      const uint32_t w = ring.w(stage.stage) + of_w, x = ring.x(stage.stage) + of_x;
      multiply(WIDE ? x : w, 0, WIDE ? w : x, 1, sums);
#if WGMMA
      wait_but_for_last();
      if (before) ring.release(before);
      before = ring.empty_barrier[stage.stage];
#else
      ring.release(ring.empty_barrier[stage.stage]);
#endif
      stage.advance(ring.stages);
    }
#if WGMMA
    wait_for(sums);
    if (before) ring.release(before);
#endif
    if (tile.leaves) {
      leave_sums(args, sums);
    } else if (args.k_ctas == 1) {
      put(args, outputs, sums);
    } else {
      Segments segments(args, place, barriers, ring.first, parities);
      segments.drain();
      segments.give(sums);
      put(args, segments, outputs);
      segments.pass_on(tile.last());
    }
  }
  ptx::wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(kTiledThreads, 1)
    tiled_gemm(const __grid_constant__ TiledGemmArgs args) {
  __shared__ uint64_t barriers[2 * kMaxStages + SegmentBarriers::kCount];
  fetch_parameters(args);
  if (args.order != kBeforeLocal) ptx::launch_dependents();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the compiler sees it is uniform
  const Place place(args);
  const Ring ring(args, args.tiers[place.tier], place, barriers);
  if (threadIdx.x == kConsumers) ptx::prefetch_tensor_map(&args.x);
  if (threadIdx.x == 0 && args.boxes) ptx::prefetch_tensor_map(&args.y_boxes);
  const SegmentBarriers of_segments(ptx::smem_address(barriers + 2 * kMaxStages));
  if (threadIdx.x == kTiledThreads - 1 && args.k_ctas > 1)
    of_segments.initialize(args.k_ctas, place.sharers);
  if (threadIdx.x % 32 == 0) ring.initialize(warp);
  __syncthreads();
  // Nobody may arrive at a barrier that is not initialised: at once, or when segments are summed.
  if (place.sharers > 1) cluster_meet();
  const bool meets_later = place.sharers == 1 && args.k_ctas > 1;
  if (meets_later) ptx::cluster_arrive_relaxed();
  if (warp < kConsumers / 32) {
#if WGMMA
    ptx::take_registers<kConsumerRegisters>();
#endif
    consume(args, ring, place, of_segments, warp / (kWarpgroup / 32));
  } else {
#if WGMMA
    ptx::keep_registers<kCopyRegisters>();
#endif
    if (warp == kConsumers / 32) {
      load_w(args, ring, place, of_segments);
    } else if (warp == kConsumers / 32 + 1) {
      load_x(args, ring, place, of_segments);
    } else {
      wait_for_input(args);
    }
    __syncwarp();
    if (meets_later) ptx::cluster_wait();
  }
  // Every thread waits for the kernels before, also those that read nothing of theirs: that this
  // kernel is complete then implies that those before it are, at any distance. And none does before
  // the CTA is done: while a warp waits, the others' work may stand still (H200, kAfterRemote).
  __syncthreads();
  ptx::wait_for_dependencies();
  if (place.sharers > 1) {
    __syncwarp();
    cluster_meet();  // arrivals go to other CTAs: all stay until all are done
  }
}
