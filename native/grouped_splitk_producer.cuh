// The ring of stages of the grouped SplitK_GEMM, and its two producer warps.
#pragma once

#include "grouped_splitk.cuh"

// A stage is W, [units][row blocks][unit], then X, [rows][atoms][128 bytes] with padding. W and X
// have barriers of their own, so that the W producer sees W land. Before the first stage lie the
// partial sums of units, and the list of experts.
struct Ring {
  Barriers w_full, x_full, empty;  // [stages]
  uint32_t smem_first;
  int stages, w_bytes, stage_bytes;

  __device__ __forceinline__ Ring(const GroupedSplitKArgs& args, uint64_t* barriers)
      : w_full{in_register(ptx::smem_address(barriers))},
        x_full{w_full[kMaxStages]},
        empty{w_full[2 * kMaxStages]},
        smem_first(in_register(ptx::smem_address(smem)) + kSumsBytes + list_bytes(args)),
        stages(args.stages),
        w_bytes((args.stage_row_blocks * kWAtomBytes + 127) / 128 * 128),
        stage_bytes(w_bytes + kXStageBytes) {}

  __device__ __forceinline__ static int list_bytes(const GroupedSplitKArgs& args) {
    return ((args.experts + 1) * static_cast<int>(sizeof(Chosen::Expert)) + 127) / 128 * 128;
  }
  __device__ __forceinline__ static Chosen::Expert* list() {
    return reinterpret_cast<Chosen::Expert*>(smem + kSumsBytes);
  }
  // By one thread.
  __device__ __forceinline__ void initialize() const {
    for (int i = 0; i < stages; i++) {
      ptx::mbarrier_init(w_full[i], 1);
      ptx::mbarrier_init(x_full[i], 1);
      ptx::mbarrier_init(empty[i], kItemRowBlocks / 2 * kArrivalsOfWarp);  // a warp has 2 of them
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t smem_w(int stage) const {
    return smem_first + stage * stage_bytes;
  }
  __device__ __forceinline__ uint32_t smem_x(int stage) const { return smem_w(stage) + w_bytes; }
};

// Keeps copies of W in flight: as many stages as the ring has, or the congestion window allows. A
// stage of a whole group is one copy, of a part of a group one copy for each unit, by a lane each.
__device__ __forceinline__ void produce_w(const GroupedSplitKArgs& args, const Ring& ring,
                                          const Chosen& chosen, int own_tier) {
  const int lane = threadIdx.x % 32;
  RingPosition fill, oldest;  // the next stage; the first one in flight
  int issued = 0, landed = 0;
  for (Items at(args, chosen, own_tier); !at.done(); at.next()) {
    const int window = args.tiers[at.tier].window;
    const uint64_t policy = ptx::l2_policy(at.last_rows());
    const bool whole = at.row_blocks == at.stored_in;
    const uint32_t unit = at.row_blocks * kUnitBytes, stored_unit = at.stored_in * kUnitBytes;
    const uint8_t* from = ptx::load_address(args.addresses + at.tier) + at.first_atom * kWAtomBytes;
    if (args.shifts != nullptr) from += args.shifts[at.number];
    for (int left = args.atoms; left > 0; left -= at.stage_atoms, issued++) {
      // Congestion window: the oldest copies in flight have to land first.
      for (; issued - landed >= window; landed++) {
        wait_barrier(ring.w_full[oldest.stage], oldest.parity);
        oldest.advance(ring.stages);
      }
      // The consumers have to release the stage.
      if (issued >= ring.stages) wait_barrier(ring.empty[fill.stage], fill.parity ^ 1);
      const int units = min(left, at.stage_atoms) / kUnitAtoms;
      const uint32_t full = ring.w_full[fill.stage], to = ring.smem_w(fill.stage);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, units * unit);
      __syncwarp();
      if (whole) {
        if (lane == 0) ptx::bulk_load_kept(to, from, units * unit, full, policy);
      } else if (lane < units) {
        ptx::bulk_load_kept(to + lane * unit, from + lane * stored_unit, unit, full, policy);
      }
      from += units * stored_unit;
      fill.advance(ring.stages);
    }
  }
}

// Copies the rows of X of each item, which earlier kernels wrote: one copy for each row, by a lane.
// Columns behind K are zeros.
__device__ __forceinline__ void produce_x(const GroupedSplitKArgs& args, const Ring& ring,
                                          const Chosen& chosen, int own_tier) {
  constexpr int kRowsOfLane = (kXRows + 31) / 32;
  const int lane = threadIdx.x % 32;
  RingPosition fill;
  int issued = 0;
  for (Items at(args, chosen, own_tier); !at.done(); at.next()) {
    const Element* rows[kRowsOfLane] = {};
#pragma unroll
    for (int i = 0; i < kRowsOfLane; i++) {
      const int pair = at.pair + lane + 32 * i;
      if (lane + 32 * i >= at.pairs) continue;
      rows[i] = args.x + static_cast<int64_t>(kGates ? args.tokens[pair] : pair) * args.k;
    }
    const int stage_cols = at.stage_atoms * kAtomK;
    for (int k = 0; k < args.atoms * kAtomK; k += stage_cols, issued++) {
      if (issued >= ring.stages) wait_barrier(ring.empty[fill.stage], fill.parity ^ 1);
      const int cols = min(stage_cols, args.k - k);  // none in a unit's padding
      const uint32_t full = ring.x_full[fill.stage],
                     to = ring.smem_x(fill.stage) + lane * kXRowBytes;
      if (cols < stage_cols) {  // the last stage of a ragged K
        const int behind = min(stage_cols, args.atoms * kAtomK - k);
#pragma unroll
        for (int i = 0; i < kRowsOfLane; i++) {
          uint8_t* const row = smem + (to - ptx::smem_address(smem)) + 32 * i * kXRowBytes;
          for (int col = max(cols, 0); col < behind && lane + 32 * i < at.pairs; col += 8)
            *reinterpret_cast<uint4*>(row + 2 * col) = uint4{};
        }
        ptx::fence_proxy_async();
        sync_warp();
      }
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, at.pairs * 2 * max(cols, 0));
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kRowsOfLane; i++) {
        if (lane + 32 * i >= at.pairs || cols <= 0) continue;
        ptx::bulk_load(to + 32 * i * kXRowBytes, rows[i] + k, 2 * cols, full);
      }
      fill.advance(ring.stages);
    }
  }
}
