// Tiled GEMM: Y[N, M] = epilogue(X[N, K] W[M, K]^T) for many rows of X, W's rows in several tiers.
//
//   grid: clusters of CTAs, one or two CTAs per SM; each tier has clusters of its own  (tiers by CTA)
//   CTAs of a cluster share X or W by multicast, or split K
//   each CTA of a tier:
//     W producer warp:
//       for each tile that the scheduler assigns, for each stage along K:
//         if the tier has a congestion window: wait until fewer than `window` stages are in flight
//         wait until the stage is empty in all CTAs that share it
//         copy the tile's row blocks of W, multicast to the CTAs along X
//         (W of 4 or 8 bits: into a ring of units, from which consumers expand it)
//     X producer warp:
//       wait for the predecessor kernel (PDL): it wrote X
//       for the same stages: wait until empty; copy X by TMA, multicast to the CTAs along W
//     consumers, two warpgroups, side by side along W or along X:
//       for each tile:
//         acc = 0, or with Stream-K load_partial of the cluster before
//         for each stage along K: wait until full; acc += W X^T; release the stage to all sharers
//         if Stream-K: the rest of the tile is the next cluster's: store_partial
//         else: with segments of K, reduce them in the cluster
//               Y = activation(acc + bias) + residual, through shared memory and TMA
//
// Scheduler (tiled_scheduler.cuh): data-parallel waves of tiles, then Stream-K for the last tiles.
// W is packed as SplitK_GEMM reads it (dakrun/formats/packed16.py). The order in which the terms of
// an output are added depends on the segments of K alone, so that tiers, tiles and the number of
// CTAs change no bit of Y.

#include "gemm_multiply.cuh"
#include "tiled_producer.cuh"
#include "tiled_segments.cuh"
#include "tiled_stream_k.cuh"
#include "tiled_units.cuh"
#if TALL
#include "grouped_tiled_epilogue.cuh"
#include "grouped_tiled_multiply.cuh"
#endif

static_assert(WGMMA || TILES <= 8 && !WIDE, "with more, operands of mma would spill");

// Waits until all CTAs of the cluster have come here. Their writes need not be visible.
__device__ __forceinline__ void sync_cluster() {
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
}

// By a warpgroup that has nothing to multiply in a tile: releases the tile's stages, and units.
__device__ __forceinline__ void release_all(const Tiles& tile, const Ring& ring, RingPosition& stage,
                                            UnitReader& units) {
  for (int left = tile.k_end - tile.k; left > 0; left--) {
    units.pass(tile, tile.k_end - left);
    wait_barrier(ring.full_barrier[stage.stage], stage.parity);
    ring.release(ring.empty_barrier[stage.stage]);
    stage.advance(ring.stages);
  }
}

// Stores a tile's outputs, each kind of epilogue with code of its own. `from` is a TileEpilogue and
// `what` the accumulators, or `from` is a SegmentReduction and `what` the TileEpilogue.
template <class From, class What>
__device__ __forceinline__ void store_outputs(const TiledGemmArgs& args, From& from,
                                              const What& what) {
  const EpilogueKind kind = epilogue_kind(args);
  if (kind == kGated) return from.template store<kGated>(what);
  if (kind == kWithResidual) return from.template store<kWithResidual>(what);
  from.template store<kPlain>(what);
}

// The consumers.
__device__ __forceinline__ void consume(const TiledGemmArgs& args, const Ring& ring,
                                        const CtaCoord& cta, const SegmentBarriers& barriers,
                                        UnitReader units, int warpgroup) {
#if !TALL
  OutputBlocks blocks(args);
#endif
  RingPosition stage;
  SegmentParities parities;
  // Wait until the other CTAs that split K have initialised their barriers.
  if (splits_k(args) && cta.sharers == 1) ptx::cluster_wait();
  for (Tiles tile(args, cta); tile.next();) {
    if (tile.first()) wait_for_input(args);
    const WarpgroupTile part(args, tile, warpgroup);
    if (!part.exists()) {
      release_all(tile, ring, stage, units);
      if (splits_k(args)) {
        SegmentReduction reduction(args, cta, barriers, ring.smem_first, parities);
        reduction.drain();
        reduction.release_stages(tile.last());
      }
      continue;
    }
    [[maybe_unused]] const uint32_t w_offset = (part.row_block - tile.row_block) * kAtomBytes,
                   x_offset = (part.n - tile.n) * kAtomK * 2;
#if TALL
    const TallEpilogue epilogue{args, part, warpgroup};
#else
    const TileEpilogue epilogue(args, part, blocks, tile.stores_partial, first_pass(args, cta));
#endif
    Accumulators acc;
    if (!kGrouped) load_partial(args, cta.sharers, tile.loads_partial, acc);

    // Main loop over the tile's stages.
#if WGMMA  // wgmma is asynchronous: a stage is released when the next stage's products have started
    uint32_t empty_before = 0;  // the barrier of the stage before
    [[maybe_unused]] const auto started = [&] {
      wait_but_for_last();
      if (empty_before) ring.release(empty_before);
      empty_before = ring.empty_barrier[stage.stage];
    };
#endif
#if CODE
    const int warp_row_block = part.row_block + threadIdx.x % kWarpgroup / 32 * 2;
    WarpUnits warp_units;
    int k = tile.k;
#if CTAS_PER_SM == 2
    // The warps of two CTAs hide each other's latencies: one set of fragments takes few registers.
#pragma unroll 1
    while (k < tile.k_end) {
      const UnitReader::Rows rows = units.wait_for_unit(tile, warp_row_block);
#pragma unroll
      for (int atom = 0; atom < kUnitAtoms; atom++) {
        if (atom < k % kUnitAtoms || k >= tile.k_end) continue;
        Fragments fragments;
        warp_units.load(rows.top, rows.bottom, atom);
        if (++k >= tile.k_end || atom + 1 == kUnitAtoms) units.release_unit();
        fragments.expand(warp_units);
        wait_barrier(ring.full_barrier[stage.stage], stage.parity);
        fragments.multiply(ring.smem_x(stage.stage) + x_offset, acc);
        wait_for(acc);
        ring.release(ring.empty_barrier[stage.stage]);
        stage.advance(ring.stages);
      }
    }
#elif WGMMA
    // Tensor cores read one set of fragments while the other is computed, piece by piece: a warp
    // that has started some products can do nothing until the first of them ends. Without a
    // branch in the loop: the compiler would let all products end before it computes fragments.
    const auto read_units = [&] {
      units.read(tile, ++k, warp_row_block, warp_units);
      started();
    };
    const auto multiply_stage = [&](const Fragments& own, const auto& between) {
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      own.multiply(ring.smem_x(stage.stage) + x_offset, acc, read_units, between);
      stage.advance(ring.stages);
    };
    const auto multiply_and_expand = [&](const Fragments& own, Fragments& next) {
      multiply_stage(own, [&](int step) { next.expand(warp_units, step); });
    };
    Fragments fragments[2];
    units.read(tile, k, warp_row_block, warp_units);
    fragments[0].expand(warp_units);
#pragma unroll 1
    while (k + 1 < tile.k_end) {
      multiply_and_expand(fragments[0], fragments[1]);
      multiply_and_expand(fragments[1], fragments[0]);
    }
    if (k < tile.k_end) multiply_and_expand(fragments[0], fragments[1]);
#else
#pragma unroll 1
    for (; k < tile.k_end; k++) {
      Fragments fragments;
      units.read(tile, k, warp_row_block, warp_units);
      fragments.expand(warp_units);
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      fragments.multiply(ring.smem_x(stage.stage) + x_offset, acc);
      ring.release(ring.empty_barrier[stage.stage]);
      stage.advance(ring.stages);
    }
#endif
#elif TALL
    multiply_tile(tile, ring, w_offset, stage, acc);
#else
#pragma unroll 1
    for (int left = tile.k_end - tile.k; left > 0; left--) {
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      const uint32_t w = ring.smem_w(stage.stage) + w_offset,
                     x = ring.smem_x(stage.stage) + x_offset;
      multiply(WIDE ? x : w, 0, WIDE ? w : x, 1, acc);
#if WGMMA
      started();
#else
      ring.release(ring.empty_barrier[stage.stage]);
#endif
      stage.advance(ring.stages);
    }
#endif
#if WGMMA
    wait_for(acc);
    if (empty_before) ring.release(empty_before);
#endif

#if CODE
    if (!tile.stores_partial) multiply_rows(warp_units.scales, acc);
#endif

#if TALL
    epilogue.store(acc);
#else
    if (tile.stores_partial) {
      store_partial(args, acc);
    } else if (!kClusters || args.k_ctas == 1) {
      store_outputs(args, epilogue, acc);
    } else {
      SegmentReduction reduction(args, cta, barriers, ring.smem_first, parities);
      reduction.drain();
      reduction.store_partials(acc);
      store_outputs(args, reduction, epilogue);
      reduction.release_stages(tile.last());
    }
#endif
  }
  ptx::wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(kTiledThreads, kCtasOfSm)
    tiled_gemm(const __grid_constant__ TiledGemmArgs args) {
  __shared__ uint64_t barriers[2 * kMaxStages + SegmentBarriers::kCount + 2 * kUnitStages];
  fetch_parameters(args);
  if (args.order != kBeforeLocal) ptx::launch_dependents();

  // The CTA's coordinates, and its barriers.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // uniform, for the compiler
  const CtaCoord cta(args);
  const Ring ring(args, args.tiers[cta.tier], cta, barriers);
  if (threadIdx.x == kConsumers) ptx::prefetch_tensor_map(&args.x);
  if (threadIdx.x == kConsumers + 32) ptx::prefetch_tensor_map(&args.x_rest);
  if (threadIdx.x == 0 && args.boxes) ptx::prefetch_tensor_map(&args.y_boxes);
  const SegmentBarriers segment_barriers(ptx::smem_address(barriers + 2 * kMaxStages));
  if (threadIdx.x == kTiledThreads - 1 && splits_k(args))
    segment_barriers.initialize(args.k_ctas, cta.sharers);
  if (threadIdx.x % 32 == 0) ring.initialize(warp);
#if GROUPED
  if (threadIdx.x == kConsumers + 64) tile_queue().initialize();
#endif
  const UnitRing unit_ring(args, cta, ring, barriers + 2 * kMaxStages + SegmentBarriers::kCount);
  if (warp == kConsumerWarps) unit_ring.initialize();
  __syncthreads();
  // No CTA may arrive at another's barrier before that is initialised. CTAs that share stages do so
  // at once; those that split K only when they reduce, and wait for each other there.
  if (cta.sharers > 1) sync_cluster();
  const bool syncs_later = cta.sharers == 1 && splits_k(args);
  if (syncs_later) ptx::cluster_arrive_relaxed();

  // Roles of warps. Consumers take over the registers of producers.
  if (warp < kConsumerWarps) {
#if WGMMA
    ptx::setmaxnreg_inc<kConsumerRegisters>();
#endif
    consume(args, ring, cta, segment_barriers, UnitReader{unit_ring}, warp / (kWarpgroup / 32));
  } else {
#if WGMMA
    ptx::setmaxnreg_dec<kProducerRegisters>();
#endif
    if (warp == kConsumerWarps) {
#if CODE
      copy_units(args, unit_ring, cta);
#else
      produce_w(args, ring, cta, segment_barriers);
#endif
    } else if (warp == kConsumerWarps + 1) {
      produce_x(args, ring, cta, segment_barriers);
#if TALL
    } else if (warp == kConsumerWarps + 2) {
      prefetch_x(args, cta);
#endif
    } else {
      wait_for_input(args);
    }
    __syncwarp();
    if (syncs_later) ptx::cluster_wait();
  }

  // Every thread waits for the predecessor kernel, even one that reads none of its output: then
  // this kernel's completion implies that of all kernels before it. Not before the CTA is done:
  // while a warp waits, the others' work may stand still (H200, kAfterRemote).
  __syncthreads();
  ptx::wait_for_dependencies();
  if (cta.sharers > 1) {
    __syncwarp();
    sync_cluster();  // no CTA may end while others still arrive at its barriers
  }
}
