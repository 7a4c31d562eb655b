// The two producer warps of the tiled GEMM: one copies W into the ring of stages, one X.
#pragma once

#include "tiled_ring.cuh"

// Waits for the predecessor kernel before its outputs are read, or overwritten.
__device__ __forceinline__ void wait_for_input(const TiledGemmArgs& args) {
  if (args.order == kAfterRemote) return;
  ptx::wait_for_dependencies();
  if (args.order == kBeforeLocal) ptx::launch_dependents();
}

// By a producer at the end of a tile: CTAs that split K exchange partial sums in the memory of the
// stages, so the producer waits until all have been read. Every lane polls the barrier, so the lanes
// that copy have acquired it themselves, and no __syncwarp() is needed behind it.
__device__ __forceinline__ void wait_for_reduction(const TiledGemmArgs& args, const Tiles& tile,
                                                   const SegmentBarriers& barriers) {
  if (splits_k(args) && !tile.last()) wait_barrier(barriers.reduced(), tile.parity());
}

// The W producer, a whole warp. Lane i stands for row block i of a tile. The row blocks of a group
// lie one behind the other, so one copy fetches all of them that belong to the tile. The lane of
// the first of these row blocks starts the copy.
__device__ __forceinline__ void produce_w(const TiledGemmArgs& args, const Ring& ring,
                                          const CtaCoord& cta, const SegmentBarriers& barriers) {
  const TierTiles& tier = args.tiers[cta.tier];
  const int lane = threadIdx.x % 32, last = args.tiers[cta.tier + 1].first_row_block - 1;
  const int window = tier.window < ring.stages ? tier.window : 1 << 30;
  // CTAs along X load W's stages round-robin and multicast them.
  const bool multicast = kClusters && args.x_ctas > 1;
  const int turns = args.x_ctas - 1, turn = multicast ? cta.sharer : 0;
  const uint64_t policy = ptx::l2_policy(tier.x_tiles == 1);  // one tile along X reads W once
  RingPosition fill, landed;
  int issued = 0;
  for (TileScheduler tile(args, cta); tile.next();) {
    const RowBlock row_block =
        tile.row_block_at(min(tile.row_block + min(lane, max(tile.row_blocks, 1) - 1), last));
    const bool copies = lane < tile.row_blocks && (lane == 0 || row_block.in_group == 0);
    const int bytes =
        min(tile.row_blocks - lane, row_block.group_row_blocks - row_block.in_group) * kAtomBytes;
    RowBlockAtoms atoms(row_block, min(tile.k, args.weight.atoms - 1));
#pragma unroll 1
    for (int k = tile.k; k < tile.k_end; k++, issued++, atoms.next()) {
      // Congestion window: the oldest stage in flight has to land first.
      if (issued >= window) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(ring.stages);
      }
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      const uint32_t full_barrier = ring.full_barrier[fill.stage];
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full_barrier, tile.row_blocks * kAtomBytes);
      __syncwarp();
      if (copies && (k & turns) == turn) {
        const uint32_t to = ring.smem_w(fill.stage) + lane * kAtomBytes;
        if (multicast) {
          ptx::bulk_load_multicast(to, atoms.from, bytes, full_barrier, cta.multicast_mask());
        } else {
          ptx::bulk_load_kept(to, atoms.from, bytes, full_barrier, policy);
        }
      }
      fill.advance(ring.stages);
    }
    wait_for_reduction(args, tile, barriers);
  }
}

// The X producer, a warp of which one thread copies. The rows of the last warpgroup along X have a
// box of their own size: rows beyond X would come as zeros, and slowly. Their sums are not stored.
// Where rows are grouped by expert, each tile may have last rows: several smaller boxes hold them.
__device__ __forceinline__ void produce_x(const TiledGemmArgs& args, const Ring& ring,
                                          const CtaCoord& cta, const SegmentBarriers& barriers) {
  constexpr int kRowBytes = kAtomK * 2;
  const int max_boxes = kWarpgroups + 1 - args.tiers[cta.tier].row_groups;
  // CTAs along W load a part of each box each and multicast it.
  const bool multicast = kClusters && args.w_ctas > 1, copies = ptx::elect_one();
  const int sharer = multicast ? cta.sharer : 0;
  RingPosition fill;
  for (Tiles tile(args, cta); tile.next();) {
    if (tile.first()) wait_for_input(args);
    const int left = max(0, tile.n_end(args) - tile.n);
    const int whole = kGrouped ? quotient(left, args.box_rows) : min(max_boxes, left / kXRows);
    const int rest = left - whole * args.box_rows;
    const int boxes = kGrouped ? whole + quotient(rest + args.rest_rows - 1, args.rest_rows)
                               : min(max_boxes, (left + kXRows - 1) / kXRows);
    const int rows = whole * args.box_rows + (boxes - whole) * args.rest_rows;
    if (copies) {
#pragma unroll 1
      for (int k = tile.k; k < tile.k_end; k++) {
        wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
        const uint32_t full_barrier = ring.full_barrier[fill.stage];
        ptx::mbarrier_arrive_expect_tx(full_barrier, args.w_ctas * rows * kRowBytes);
#pragma unroll 1
        for (int i = 0; i < boxes; i++) {
          const TensorMap* map = i < whole ? &args.x : &args.x_rest;
          const int part = (i < whole ? args.box_rows : args.rest_rows) * sharer;
          const int behind = kGrouped ? max(0, i - whole) : 0;  // of the small boxes
          const int apart = kGrouped ? args.box_rows : kXRows;
          const int n = tile.n + (i - behind) * apart + behind * args.rest_rows + part;
          const uint32_t to = ring.smem_x(fill.stage) + (i - behind) * (apart * kRowBytes) +
                              (behind * args.rest_rows + part) * kRowBytes;
          if (multicast) {
            ptx::tensor_load_multicast(to, map, k * kAtomK, n, 0, full_barrier,
                                       cta.multicast_mask());
          } else {
            ptx::tensor_load(to, map, k * kAtomK, n, 0, full_barrier);
          }
        }
        fill.advance(ring.stages);
      }
    }
    wait_for_reduction(args, tile, barriers);
  }
}

#if TALL
// By a warp of its own. TMA reads 128 bytes of each row of X at a time, which is slow where they come
// from HBM, and all tiles of an expert wait for the same rows. So rows are fetched to L2 before, as
// they lie in memory: those of an expert whose tiles come about half a tile's time later, a part of
// them with each tile of W; with the first tile those of its own expert, too.
__device__ __forceinline__ void prefetch_x(const TiledGemmArgs& args, const CtaCoord& cta) {
  const TierTiles& tier = args.tiers[cta.tier];
  const int size = tier.tile_row_blocks;
  const int parts = quotient(args.expert_row_blocks + size - 1, size);
  const int ahead = max(1, quotient(tier.clusters, 2 * parts));
  const int row_bytes = args.cols * sizeof(Element);
  for (Tiles tile(args, cta); tile.next();) {
    if (tile.first()) wait_for_input(args);
    const int part = quotient(tile.row_block - tile.first_row_block, size);
    const int own = quotient(tile.first_row_block, args.expert_row_blocks);
    const int last = min(own + ahead, args.experts - 1);
#pragma unroll 1
    for (int expert = tile.first() ? own : own + ahead; expert <= last; expert += ahead) {
      const int begin = expert > 0 ? ptx::load_from_l2(args.ends + expert - 1) : 0;
      const int end = ptx::load_from_l2(args.ends + expert);
      const int rows = quotient(end - begin + parts - 1, parts), first = begin + part * rows;
#pragma unroll 1
      for (int row = first + threadIdx.x % 32; row < min(first + rows, end); row += 32)
        ptx::bulk_prefetch(args.rows + static_cast<int64_t>(row) * args.cols, row_bytes);
    }
  }
}
#endif
