// How W and X come to a CTA of SplitK_GEMM: the ring of stages, and the threads that fill it.
#pragma once

#include "splitk_gemm.cuh"

// Where X has many rows, stages are small, and what one costs counts: a whole warp then goes
// through them, with what it reckons in uniform registers, from which copies start at once. For few
// rows it is sooner that a single thread has its first copies under way.
constexpr bool kWholeWarps = X_TILES >= 4;

// True in the thread of those that go through the stages which starts copies and arrives for all.
__device__ __forceinline__ bool copies_for_warp() {
  return !kWholeWarps || ptx::elect_one();
}

constexpr int kLastCopies = 2;  // that are in flight when L2 is to look ahead

// A stage is W, [groups][atoms][row blocks][8 rows][128 bytes], then X, [atoms][rows][128 bytes].
struct Ring {
  Barriers full_barrier;   // [stages]: W, and with it X, has landed
  Barriers x_barrier;      // [stages]: X has landed, where the window is to count W alone
  Barriers empty_barrier;  // [stages]: all warps that read the stage are done with it
  uint32_t first;
  int stages, group_bytes, w_bytes, stage_bytes;
  bool windowed;
  bool split;   // the warpgroups share groups
  bool shared;  // they share stages

  __device__ __forceinline__ Ring(const SplitKGemmArgs& args, const Tier& tier, uint64_t* barriers)
      : full_barrier{in_register(ptx::smem_address(barriers))},
        x_barrier{full_barrier[kMaxStages]},
        empty_barrier{full_barrier[2 * kMaxStages]},
        first(in_register(ptx::smem_address(smem))),
        stages(tier.stages),
        group_bytes(tier.group_row_blocks * tier.stage_atoms * kAtomBytes),
        w_bytes((kPairs ? tier.groups : 1) * group_bytes),
        stage_bytes(w_bytes + tier.stage_atoms * kXAtomBytes),
        windowed(tier.window < tier.stages),
        split(tier.group_row_blocks > kTileRowBlocks),
        shared(split || kPairs && tier.groups == 2 || has_halves(args)) {}

  // By the thread that copies W, and that which copies X. All that there could be: loops are
  // slower.
  __device__ __forceinline__ void initialize_w() const {
#pragma unroll
    for (int i = 0; i < kMaxStages; i++)
      ptx::mbarrier_init(full_barrier[i], windowed ? 1 : 2);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ void initialize_x() const {
    const int readers = (shared ? kConsumers : kWarpgroup) / 32 * kArrivalsOfWarp;
#pragma unroll
    for (int i = 0; i < kMaxStages; i++) {
      ptx::mbarrier_init(empty_barrier[i], readers);
      ptx::mbarrier_init(x_barrier[i], 1);
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t w(int stage) const { return first + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t x(int stage) const { return w(stage) + w_bytes; }
};

// Where the W of a CTA's stages lies, of the first or second of the groups that they have. One
// thread goes through it, an instruction after the other, so what a stage costs counts: no
// division, no multiplication that can be an addition.
struct Source {
  Cursor at;
  const int k_end, step_atoms;
  int first;                      // the group's row block in a wave
  const uint8_t *step, *from;     // the next step of the wave; the stage
  int row_blocks, in_wave, left;  // of the group; of the wave; atoms of the step

  __device__ __forceinline__ Source(const SplitKGemmArgs& args, int number, int group = 0)
      : at(args, number),
        k_end(args.k / kAtomK),
        step_atoms(args.tiers[number].step_atoms),
        first(group ? (at.row_block + at.second) % at.wave_row_blocks : at.row_block) {
    at.row_block += group * at.second;
    begin_group();
  }
  __device__ __forceinline__ bool done() const { return at.done(); }
  __device__ __forceinline__ uint32_t bytes() const {
    return row_blocks * min(at.stage_atoms, left) * kAtomBytes;
  }
  __device__ __forceinline__ void next() {
    from += bytes();
    left -= at.stage_atoms;
    if (at.next_stage()) {
      begin_group();
    } else if (left <= 0) {
      begin_step();
    }
  }

 private:
  __device__ __forceinline__ void begin_group() {
    if (kMixes) first = at.row_block % at.wave_row_blocks;
    const int wave = at.row_block - first;
    row_blocks = at.row_blocks();
    in_wave = min(at.wave_row_blocks, at.tier_row_blocks - wave);
    step = at.args.tiers[at.number].base + static_cast<int64_t>(wave) * k_end * kAtomBytes;
    if (kHalves) step += static_cast<int64_t>(in_wave * at.k) * kAtomBytes;
    begin_step();
  }
  __device__ __forceinline__ void begin_step() {
    left = min(step_atoms, k_end - at.k);
    from = step + static_cast<uint32_t>(first * left * kAtomBytes);  // a wave's step is below 2 GiB
    step += static_cast<uint32_t>(in_wave * left * kAtomBytes);
  }
};

// Keeps copies of W in flight. The first ones do not depend on the kernels before, and come before
// all else: how soon a launch starts to read is what counts between the end of one and the next.
struct Producer {
  const Ring& ring;
  Source w, second;
  RingPosition fill;
  int issued = 0;

  __device__ __forceinline__ Producer(const SplitKGemmArgs& args, const Ring& ring, int number)
      : ring(ring), w(args, number), second(args, number, 1) {}

  __device__ __forceinline__ void fill_ring(int window) {
    for (; issued < window && !w.done(); issued++)
      load();
  }

  __device__ __forceinline__ void run() {
    RingPosition landed;
    for (; !w.done(); issued++) {
      if (ring.windowed) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(ring.stages);
      }
      if (issued >= ring.stages) wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      load();
    }
  }

  // Gives memory something to do while this launch ends and the next one waits for it. Earlier, it
  // would take from the CTAs that are behind.
  __device__ __forceinline__ void look_ahead(const SplitKGemmArgs& args) const {
    if (args.ahead_bytes == 0 || args.order.number() >= args.tiers[1].first_cta) return;
    // A barrier tells of the last copy into its stage alone.
    const int landed = issued - min(kLastCopies, ring.stages - 1);
    if (landed > 0) {
      const RingPosition last(landed - 1, ring.stages);
      wait_barrier(ring.full_barrier[last.stage], last.parity);
    }
    if (copies_for_warp())
      ptx::bulk_prefetch(args.ahead + static_cast<int64_t>(args.order.number()) * args.ahead_bytes,
                         args.ahead_bytes);
  }

 private:
  __device__ __forceinline__ void load() {
    const uint32_t barrier = ring.full_barrier[fill.stage];
    const bool two = kPairs && w.at.second && second.row_blocks > 0;
    if (copies_for_warp()) {
      const uint32_t to = ring.w(fill.stage), bytes = w.bytes(), more = two ? second.bytes() : 0;
      ptx::mbarrier_arrive_expect_tx(barrier, bytes + more);
      ptx::bulk_load_once(to, w.from, bytes, barrier);
      if (two) ptx::bulk_load_once(to + ring.group_bytes, second.from, more, barrier);
    }
    if (two) second.next();
    w.next();
    fill.advance(ring.stages);
  }
};

// Brings X, which the kernels before wrote, in whole boxes: what lies behind K comes as zeros. What
// can be done before these have ended is: how soon the first stages have their X is what a launch
// waits for.
struct XLoader {
  const SplitKGemmArgs& args;
  const Ring& ring;
  const uint32_t first_barrier, box;
  const int boxes, x_atoms;
  const bool flat;  // the map
  Cursor at;
  RingPosition fill;
  int announced = 0;  // the first stages

  __device__ __forceinline__ XLoader(const SplitKGemmArgs& args, const Ring& ring, int number)
      : args(args),
        ring(ring),
        first_barrier(ptx::anew((ring.windowed ? ring.x_barrier : ring.full_barrier).first)),
        box(ptx::anew(args.x_atoms * kXAtomBytes)),
        boxes(ptx::anew(args.tiers[number].x_boxes)),
        x_atoms(ptx::anew(args.x_atoms)),
        flat(x_atoms == 1),
        at(args, number) {
    Cursor next = at;
    for (; announced < ring.stages && !next.done(); announced++, next.next_stage())
      announce(announced);
  }

  __device__ __forceinline__ void run() {
    for (int i = 0; i < announced; i++, at.next_stage())
      load();
    for (; !at.done(); at.next_stage()) {
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      announce(fill.stage);
      load();
    }
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int stage) const { return first_barrier + 8 * stage; }
  __device__ __forceinline__ void announce(int stage) const {
    if (copies_for_warp()) ptx::mbarrier_arrive_expect_tx(barrier(stage), boxes * box);
  }
  __device__ __forceinline__ void load() {
    uint32_t to = ring.x(fill.stage);
#pragma unroll 1
    for (int i = 0, atom = at.k; i < boxes; i++, atom += x_atoms, to += box) {
      const int column = flat ? atom * kAtomK : 0, of_map = flat ? 0 : atom;
      if (copies_for_warp()) {
        ptx::tensor_load(to, &args.x, column, 0, of_map, barrier(fill.stage));
      }
    }
    fill.advance(ring.stages);
  }
};
