// The two producer warps of SplitK_GEMM: one copies W into the ring of stages, one X.
#pragma once

#include "splitk_ring.cuh"
#include "splitk_scheduler.cuh"

constexpr int kLastCopies = 2;  // copies in flight when the prefetch for a later launch starts

// Iterator over the memory of W that a CTA's stages copy, for the first or the second group of each
// stage. One thread runs it, and its computations for a stage delay the stage's copy: there are no
// divisions, and additions instead of multiplications where possible.
struct WeightWalk {
  Scheduler at;
  const int k_end, step_atoms;
  int group_start;                              // the group's first row block in its wave
  const uint8_t *step, *from;                   // the wave's next step; the current stage
  int row_blocks, wave_row_blocks, atoms_left;  // of the group; of the wave; of the step

  __device__ __forceinline__ WeightWalk(const SplitKGemmArgs& args, int tier, int group = 0)
      : at(args, tier),
        k_end(args.k / kAtomK),
        step_atoms(args.tiers[tier].step_atoms),
        group_start(group ? (at.row_block + at.second) % at.wave_row_blocks : at.row_block) {
    at.row_block += group * at.second;
    begin_group();
  }
  __device__ __forceinline__ bool done() const { return at.done(); }
  // Bytes of the current stage, which lie together.
  __device__ __forceinline__ uint32_t bytes() const {
    return row_blocks * min(at.stage_atoms, atoms_left) * kWAtomBytes;
  }
  __device__ __forceinline__ void next() {
    from += bytes();
    atoms_left -= at.stage_atoms;
    if (next_stage(at)) {
      begin_group();
    } else if (atoms_left <= 0) {
      begin_step();
    }
  }

 private:
  __device__ __forceinline__ void begin_group() {
    if (kMixes) group_start = at.row_block % at.wave_row_blocks;
    const int wave = at.row_block - group_start;
    row_blocks = at.row_blocks();
    wave_row_blocks = min(at.wave_row_blocks, at.tier_row_blocks - wave);  // fewer in the last wave
    step = ptx::load_address(at.args.addresses + at.tier) +
           static_cast<int64_t>(wave) * k_end * kWAtomBytes;
    if (kHalves) step += static_cast<int64_t>(wave_row_blocks * at.k) * kWAtomBytes;
    begin_step();
  }
  __device__ __forceinline__ void begin_step() {
    atoms_left = min(step_atoms, k_end - at.k);
    // A wave's step is below 2 GiB.
    from = step + static_cast<uint32_t>(group_start * atoms_left * kWAtomBytes);
    step += static_cast<uint32_t>(wave_row_blocks * atoms_left * kWAtomBytes);
  }
};

// Keeps copies of W in flight: as many stages as the ring has, or the congestion window allows.
struct WProducer {
  const Ring& ring;
  WeightWalk first, second;  // of a stage's groups
  RingPosition fill;
  int issued = 0;

  __device__ __forceinline__ WProducer(const SplitKGemmArgs& args, const Ring& ring, int tier)
      : ring(ring), first(args, tier), second(args, tier, 1) {}

  // Starts the first copies, up to `count`. W does not depend on the predecessor kernel; how soon
  // a launch starts to read decides how long memory idles between two launches.
  __device__ __forceinline__ void fill_ring(int count) {
    for (; issued < count && !first.done(); issued++)
      load();
  }

  __device__ __forceinline__ void run() {
    RingPosition landed;
    for (; !first.done(); issued++) {
      // Congestion window: the oldest copy in flight has to land first.
      if (ring.windowed) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(ring.stages);
      }
      // The consumers have to release the stage.
      if (issued >= ring.stages) wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      load();
    }
  }

  // Prefetches to L2 what a later launch reads, so that memory is busy while this launch ends. Any
  // earlier it would slow down the CTAs that still read.
  __device__ __forceinline__ void look_ahead(const SplitKGemmArgs& args) const {
    if (args.ahead_bytes == 0 || args.order.number() >= args.tiers[1].first_cta) return;
    // A barrier only tells of the last copy into its stage.
    const int landed = issued - min(kLastCopies, ring.stages - 1);
    if (landed > 0) {
      const RingPosition last(landed - 1, ring.stages);
      wait_barrier(ring.full_barrier[last.stage], last.parity);
    }
    if (is_copying_thread())
      ptx::bulk_prefetch(args.ahead + static_cast<int64_t>(args.order.number()) * args.ahead_bytes,
                         args.ahead_bytes);
  }

 private:
  __device__ __forceinline__ void load() {
    const uint32_t full_barrier = ring.full_barrier[fill.stage];
    const bool two = kPairs && first.at.second && second.row_blocks > 0;
    if (is_copying_thread()) {
      const uint32_t smem_w = ring.smem_w(fill.stage), bytes = first.bytes(),
                     more = two ? second.bytes() : 0;
      ptx::mbarrier_arrive_expect_tx(full_barrier, bytes + more);
      ptx::bulk_load_once(smem_w, first.from, bytes, full_barrier);
      if (two) ptx::bulk_load_once(smem_w + ring.group_bytes, second.from, more, full_barrier);
    }
    if (two) second.next();
    first.next();
    fill.advance(ring.stages);
  }
};

// Copies X, which the predecessor kernel wrote, in whole boxes; TMA fills what lies behind K with
// zeros. The constructor does all that can be done before the predecessor has ended: a launch waits
// for X's first stages.
struct XProducer {
  const SplitKGemmArgs& args;
  const Ring& ring;
  const uint32_t first_barrier, box_bytes;
  const int boxes, x_atoms;
  const bool flat;  // the tensor map is [1][N][K]
  Scheduler at;
  RingPosition fill;
  int announced = 0;  // stages whose barriers expect X already

  __device__ __forceinline__ XProducer(const SplitKGemmArgs& args, const Ring& ring, int tier)
      : args(args),
        ring(ring),
        first_barrier(ptx::opaque((ring.windowed ? ring.x_full_barrier : ring.full_barrier).first)),
        box_bytes(ptx::opaque(args.x_atoms * kXAtomBytes)),
        boxes(ptx::opaque(args.tiers[tier].x_boxes)),
        x_atoms(ptx::opaque(args.x_atoms)),
        flat(x_atoms == 1),
        at(args, tier) {
    Scheduler next = at;
    for (; announced < ring.stages && !next.done(); announced++, next_stage(next))
      announce(announced);
  }

  __device__ __forceinline__ void run() {
    for (int i = 0; i < announced; i++, next_stage(at))
      load();
    for (; !at.done(); next_stage(at)) {
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      announce(fill.stage);
      load();
    }
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int stage) const { return first_barrier + 8 * stage; }
  __device__ __forceinline__ void announce(int stage) const {
    if (is_copying_thread()) ptx::mbarrier_arrive_expect_tx(barrier(stage), boxes * box_bytes);
  }
  __device__ __forceinline__ void load() {
    uint32_t to = ring.smem_x(fill.stage);
#pragma unroll 1
    for (int i = 0, atom = at.k; i < boxes; i++, atom += x_atoms, to += box_bytes) {
      const int column = flat ? atom * kAtomK : 0, of_map = flat ? 0 : atom;
      if (is_copying_thread()) {
        ptx::tensor_load(to, &args.x, column, 0, of_map, barrier(fill.stage));
      }
    }
    fill.advance(ring.stages);
  }
};
