// W of 4 or 8 bits in the tiled GEMM: its producer copies units into a ring of their own, and six
// warps expand them into the stages, as the 16-bit atoms that consumers read from shared memory.
//
//   W producer --copy--> [ units ] [ units ] ... --> six warps: expand, scale --> [ W | X ] ...
//
// So a weight is expanded once for all rows of X of the CTA, while consumers multiply, and they need
// no registers for it. Two warps alone would take longer than the products. The ring of units lies
// before the stages.
#pragma once

#include "tiled_producer.cuh"
#include "units.cuh"

#if CODE

// The ring of units of a CTA, and its barriers. CTAs along X fill each other's by multicast.
struct UnitRing {
  Barriers full_barrier;   // [kUnitStages]: the units have landed
  Barriers empty_barrier;  // [kUnitStages]: the warps that expand have read them, in all sharers
  uint32_t offset;         // in shared memory
  int stage_bytes;
  int sharers, first_sharer;

  __device__ __forceinline__ UnitRing(const TiledGemmArgs& args, const Place& place,
                                      const Ring& ring, uint64_t* barriers)
      : full_barrier{in_register(ptx::smem_address(barriers))},
        empty_barrier{full_barrier[kUnitStages]},
        offset(ring.smem_first - ring_of_units(args.tiers[place.tier]) - ptx::smem_address(smem)),
        stage_bytes(args.tiers[place.tier].tile_row_blocks * kUnitBytes),
        sharers(kClusters && args.x_ctas > 1 ? place.sharers : 1),
        first_sharer(place.first_sharer) {}

  // By a warp, of which one lane writes.
  __device__ __forceinline__ void initialize() const {
    if (threadIdx.x % 32) return;
    for (int i = 0; i < kUnitStages; i++) {
      ptx::mbarrier_init(full_barrier[i], 1);
      ptx::mbarrier_init(empty_barrier[i], kExpanders * (sharers > 1 ? sharers : kArrivalsOfWarp));
    }
    ptx::fence_mbarrier_init();
  }
  // Of a stage's row block `row_block`.
  __device__ __forceinline__ const uint8_t* unit(int stage, int row_block) const {
    return smem + (offset + stage * stage_bytes + row_block * kUnitBytes);
  }
  // By a warp that expands: it has read a stage.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (sharers == 1) {
      if (arrives_for_warp()) ptx::mbarrier_arrive(empty_barrier[stage]);
    } else if (threadIdx.x % 32 < sharers) {
      ptx::mbarrier_arrive_cluster(empty_barrier[stage], first_sharer + threadIdx.x % 32);
    }
  }
};

// Whether a tile's atom k is the first, or the last, of a unit that the tile reads.
__device__ __forceinline__ bool begins_unit(const Tiles& tile, int k) {
  return k == tile.k || k % kUnitAtoms == 0;
}
__device__ __forceinline__ bool ends_unit(const Tiles& tile, int k) {
  return k + 1 == tile.k_end || (k + 1) % kUnitAtoms == 0;
}

// The W producer, a whole warp: as produce_w(), but for units.
__device__ __forceinline__ void copy_units(const TiledGemmArgs& args, const UnitRing& ring,
                                           const Place& place) {
  const TierTiles& tier = args.tiers[place.tier];
  const int lane = threadIdx.x % 32, last = args.tiers[place.tier + 1].first_row_block - 1;
  const bool multicast = kClusters && args.x_ctas > 1;
  const int turns = args.x_ctas - 1, turn = multicast ? place.sharer : 0;
  const uint64_t policy = ptx::l2_policy(tier.x_tiles == 1);  // one tile along X reads W once
  RingPosition fill, landed;
  int issued = 0;
  for (TileScheduler tile(args, place); tile.next();) {
    const RowBlock row_block(args.weight,
                             min(tile.row_block + min(lane, max(tile.row_blocks, 1) - 1), last));
    const bool copies = lane < tile.row_blocks && (lane == 0 || row_block.place == 0);
    const int bytes =
        min(tile.row_blocks - lane, row_block.group_row_blocks - row_block.place) * kUnitBytes;
    RowBlockAtoms units(row_block, min(tile.k, args.weight.atoms - 1) & -kUnitAtoms);
#pragma unroll 1
    for (int k = tile.k; k < tile.k_end; k++) {
      if (!begins_unit(tile, k)) continue;
      // Congestion window: the oldest copy in flight has to land first.
      if (issued++ >= tier.window) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(kUnitStages);
      }
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      const uint32_t full_barrier = ring.full_barrier[fill.stage];
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full_barrier, tile.row_blocks * kUnitBytes);
      __syncwarp();
      if (copies && (k / kUnitAtoms & turns) == turn) {
        const uint32_t to = ptx::smem_address(ring.unit(fill.stage, lane));
        if (multicast) {
          ptx::bulk_load_multicast(to, units.from, bytes, full_barrier, place.multicast_mask());
        } else {
          ptx::bulk_load_kept(to, units.from, bytes, full_barrier, policy);
        }
      }
      units.next();
      fill.advance(kUnitStages);
    }
  }
}

// The warps that expand, row blocks in turn.
__device__ __forceinline__ void expand_units(const TiledGemmArgs& args, const Ring& ring,
                                             const UnitRing& units, const Place& place,
                                             const SegmentBarriers& barriers) {
  const int warp = threadIdx.x / 32 - (kConsumerWarps + 2), lane = threadIdx.x % 32;
  RingPosition fill, unit;
  for (Tiles tile(args, place); tile.next();) {
#pragma unroll 1
    for (int k = tile.k; k < tile.k_end; k++) {
      if (begins_unit(tile, k)) wait_barrier(units.full_barrier[unit.stage], unit.parity);
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      const uint32_t to = ring.smem_w(fill.stage);
#pragma unroll 2
      for (int i = warp; i < tile.row_blocks; i += kExpanders)
        Pairs(units.unit(unit.stage, i), k % kUnitAtoms, lane).store(to + i * kAtomBytes, lane);
      ptx::fence_proxy_async();  // before wgmma reads the stage
      __syncwarp();
      if (arrives_for_warp()) ptx::mbarrier_arrive(ring.full_barrier[fill.stage]);
      fill.advance(ring.stages);
      if (!ends_unit(tile, k)) continue;
      units.release(unit.stage);
      unit.advance(kUnitStages);
    }
    wait_for_reduction(args, tile, barriers);
  }
}
#endif
