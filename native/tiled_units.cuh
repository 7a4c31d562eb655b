// W of 4 or 8 bits in the tiled GEMM: its producer copies units into a ring of their own, from which
// the warps that multiply expand them, into the registers from which tensor cores read W.
//
//   W producer --copy--> [ units ] [ units ] ... --> consumers: expand, scale; acc += W X^T
//   X producer --copy--> [ X ] [ X ] ...         -->
//
// So shared memory, which limits the products of 16 bits, is read once for W, and as few bytes as W
// has. A stage's fragments are computed while tensor cores multiply those of the stage before, each
// one behind the start of a product; where two CTAs share an SM, while those of the other CTA are
// multiplied. The ring of units lies before the stages, which have X alone.
#pragma once

#include "gemm_multiply.cuh"
#include "tiled_producer.cuh"
#if CODE
#include "tiled_scales.cuh"
#endif

#if CODE

// The ring of units of a CTA, and its barriers. CTAs along X fill each other's by multicast.
struct UnitRing {
  Barriers full_barrier;   // [kUnitStages]: the units have landed
  Barriers empty_barrier;  // [kUnitStages]: all consumer warps of all sharers have read them
  uint32_t offset;         // in shared memory
  int stage_bytes;
  int sharers, first_sharer;

  __device__ __forceinline__ UnitRing(const TiledGemmArgs& args, const CtaCoord& cta,
                                      const Ring& ring, uint64_t* barriers)
      : full_barrier{in_register(ptx::smem_address(barriers))},
        empty_barrier{full_barrier[kUnitStages]},
        offset(ring.smem_first - ring_of_units(args.tiers[cta.tier]) - ptx::smem_address(smem)),
        stage_bytes(args.tiers[cta.tier].tile_row_blocks * kUnitBytes),
        sharers(kClusters && args.x_ctas > 1 ? cta.sharers : 1),
        first_sharer(cta.first_sharer) {}

  // By a warp, of which one lane writes.
  __device__ __forceinline__ void initialize() const {
    if (threadIdx.x % 32) return;
    for (int i = 0; i < kUnitStages; i++) {
      ptx::mbarrier_init(full_barrier[i], 1);
      ptx::mbarrier_init(empty_barrier[i], kConsumerWarps * (sharers > 1 ? sharers : kArrivalsOfWarp));
    }
    ptx::fence_mbarrier_init();
  }
  // Of a stage's row block `row_block`.
  __device__ __forceinline__ const uint8_t* unit(int stage, int row_block) const {
    return smem + (offset + stage * stage_bytes + row_block * kUnitBytes);
  }
  // By a consumer warp: it has read a stage.
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
                                           const CtaCoord& cta) {
  const TierTiles& tier = args.tiers[cta.tier];
  const int lane = threadIdx.x % 32, last = args.tiers[cta.tier + 1].first_row_block - 1;
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
        min(tile.row_blocks - lane, row_block.group_row_blocks - row_block.in_group) * kUnitBytes;
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
          ptx::bulk_load_multicast(to, units.from, bytes, full_barrier, cta.multicast_mask());
        } else {
          ptx::bulk_load_kept(to, units.from, bytes, full_barrier, policy);
        }
      }
      units.next();
      fill.advance(kUnitStages);
    }
  }
}

// A warp's codes and scales of 64 columns of two row blocks, `top` and `bottom` in shared memory.
struct WarpUnits {
  PairScales scales[2];
  Codes<4> codes[2];

  __device__ __forceinline__ void load(const uint8_t* top, const uint8_t* bottom, int atom) {
    const int lane = opaque_lane();
    scales[0].load(top, atom, lane / 4), scales[1].load(bottom, atom, lane / 4);
    codes[0].load(top, atom, 0, lane), codes[1].load(bottom, atom, 0, lane);
  }
};

// The fragments of W of a warp for 64 columns: four products of 16 columns, and for each what
// ptx::wgmma and ptx::mma take of two row blocks.
struct Fragments {
  uint32_t of[4][4];

  // The fragment of product `step`.
  __device__ __forceinline__ void expand(const WarpUnits& from, int step) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t pairs[2];
      if (kPlaced) from.codes[i].place(step, pairs);
      else from.codes[i].expand(step, from.scales[i], pairs);
      of[step][i] = from.scales[i].multiply(pairs[0], step);
      of[step][2 + i] = from.scales[i].multiply(pairs[1], step);
    }
  }
  __device__ __forceinline__ void expand(const WarpUnits& from) {
#pragma unroll
    for (int step = 0; step < 4; step++)
      expand(from, step);
  }

#if WGMMA
  // Starts acc += W X^T for 64 columns of X at a shared address. Behind the first product calls
  // `started`, and behind each one `between`.
  template <class Started, class Between>
  __device__ __forceinline__ void multiply(uint32_t x, Accumulators& acc, const Started& started,
                                           const Between& between) const {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      ptx::wgmma_fence();  // `between` writes registers that later products read
      const uint64_t b = ptx::matrix_descriptor(x + 32 * step);  // without a carry
      ptx::wgmma(acc.tile[0], of[step], b, true, Element());
      if (step % 2 == 1) ptx::wgmma_commit();
      if (step == 1) started();
      if (step >= 1) between(step - 1);
    }
    between(3);
  }
  __device__ __forceinline__ void multiply(uint32_t x, Accumulators& acc) const {
    const uint64_t b = ptx::matrix_descriptor(__shfl_sync(0xffffffff, x, 0));  // uniform
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      ptx::wgmma(acc.tile[0], of[step], b + 2 * step, true, Element());
    ptx::wgmma_commit();
  }
#else
  // acc += W X^T for 64 columns of X at a shared address.
  __device__ __forceinline__ void multiply(uint32_t x, Accumulators& acc) const {
    const int lane = threadIdx.x % 32;
    x += lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);  // as in gemm_multiply.cuh
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, (x ^ 64 * half) + tile * 8 * 128);
#pragma unroll
        for (int step = 0; step < 2; step++)
          ptx::mma(acc.tile[0][2 * tile], acc.tile[0][2 * tile + 1], of[2 * half + step],
                   b[2 * step], b[2 * step + 1], Element());
      }
    }
  }
#endif
};

// A consumer warp's way through the ring of units.
struct UnitReader {
  const UnitRing& ring;
  RingPosition unit;

  // A tile's atom `k` along K of row blocks `row_block` and `row_block` + 1, or behind the last
  // atom nothing.
  __device__ __forceinline__ void read(const Tiles& tile, int k, int row_block, WarpUnits& to) {
    if (k >= tile.k_end) return;
    wait(tile, k);
    // Warps without row blocks compute what is not stored.
    const int first = row_block - tile.row_block, last = tile.row_blocks - 1;
    to.load(ring.unit(unit.stage, min(first, last)), ring.unit(unit.stage, min(first + 1, last)),
            static_cast<uint32_t>(k) % kUnitAtoms);
    release(tile, k);
  }
  // The same for a tile of which the warp has nothing.
  __device__ __forceinline__ void pass(const Tiles& tile, int k) {
    wait(tile, k);
    release(tile, k);
  }
  // The warp's two row blocks of the next unit, which is waited for.
  struct Rows {
    const uint8_t *top, *bottom;
  };
  __device__ __forceinline__ Rows wait_for_unit(const Tiles& tile, int row_block) const {
    wait_barrier(ring.full_barrier[unit.stage], unit.parity);
    const int first = row_block - tile.row_block, last = tile.row_blocks - 1;
    return {ring.unit(unit.stage, min(first, last)), ring.unit(unit.stage, min(first + 1, last))};
  }
  __device__ __forceinline__ void release_unit() {
    ring.release(unit.stage);
    unit.advance(kUnitStages);
  }

 private:
  __device__ __forceinline__ void wait(const Tiles& tile, int k) const {
    if (begins_unit(tile, k)) wait_barrier(ring.full_barrier[unit.stage], unit.parity);
  }
  __device__ __forceinline__ void release(const Tiles& tile, int k) {
    if (!ends_unit(tile, k)) return;
    ring.release(unit.stage);
    unit.advance(kUnitStages);
  }
};
#else

// W of 16 bits has no units.
struct UnitRing {
  template <class... Args>
  __device__ __forceinline__ explicit UnitRing(const Args&...) {}
  __device__ __forceinline__ void initialize() const {}
};
struct UnitReader {
  const UnitRing& ring;

  __device__ __forceinline__ void pass(const Tiles&, int) const {}
};

#endif
