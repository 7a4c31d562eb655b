// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for N <= 64, the rows of W lying in several memory tiers.
//
// W is packed (dakrun/kernels/packing.py) in octets of 8 rows, each of which lies in one tier. A
// CTA computes rows in groups of octets: whole ones, or for many rows of X halves of sums that
// depend on the shapes alone (gemm_halves.cuh). The order of a sum's terms thus depends on neither
// tiers nor the number of CTAs, and they change no bit of Y.
//
// Every CTA serves one tier. A thread keeps copies of W in flight into a ring of stages, another
// those of X, and two warpgroups multiply. Of groups of more than 8 octets each takes its part, so
// that X is read once for both; smaller ones they take in turns, one storing while the other
// multiplies, or two at once, where that X is read once for both counts for more.

#include "gemm_epilogue.cuh"
#include "gemm_halves.cuh"
#include "gemm_multiply.cuh"
#include "splitk_gemm.cuh"

constexpr int kTurnBarrier = 1;  // and the next: where warpgroups wait for their turn
constexpr int kNormBarrier = 3;  // where they wait for the moments of X

constexpr int kLastCopies = 2;  // that are in flight when L2 is to look ahead
constexpr int kIdleNs = 2000;   // in which the next launch's CTAs have come to their SMs

// A stage is W, [groups][atoms][octets][8 rows][128 bytes], then X, [atoms][rows][128 bytes].
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
        group_bytes(tier.group_octets * tier.stage_atoms * kAtomBytes),
        w_bytes((kPairs ? tier.groups : 1) * group_bytes),
        stage_bytes(w_bytes + tier.stage_atoms * kXAtomBytes),
        windowed(tier.window < tier.stages),
        split(tier.group_octets > kTileOctets),
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
  const Tier tier;
  Cursor at;
  const int k_end, first;      // atoms along k; the group's octet in a wave
  const uint8_t *step, *from;  // the next step of the wave; the stage
  int octets, in_wave, left;   // of the group; of the wave; atoms of the step

  __device__ __forceinline__ Source(const SplitKGemmArgs& args, int number, int group = 0)
      : tier(args.tiers[number]),
        at(args, number),
        k_end(args.k / kAtomK),
        first(group ? (at.octet + at.second) % at.wave_octets : at.octet) {
    at.octet += group * at.second;
    begin_group();
  }
  __device__ __forceinline__ bool done() const { return at.done(); }
  __device__ __forceinline__ uint32_t bytes() const {
    return octets * min(at.stage_atoms, left) * kAtomBytes;
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
    const int wave = at.octet - first;
    octets = at.octets();
    in_wave = min(at.wave_octets, at.tier_octets - wave);
    step = tier.base + static_cast<int64_t>(wave) * k_end * kAtomBytes;
    if (kHalves) step += static_cast<int64_t>(in_wave * at.k) * kAtomBytes;
    begin_step();
  }
  __device__ __forceinline__ void begin_step() {
    left = min(tier.step_atoms, k_end - at.k);
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
    if (args.ahead_bytes == 0 || blockIdx.x >= args.tiers[1].first_cta) return;
    // A barrier tells of the last copy into its stage alone.
    const int landed = issued - min(kLastCopies, ring.stages - 1);
    if (landed > 0) {
      const RingPosition last(landed - 1, ring.stages);
      wait_barrier(ring.full_barrier[last.stage], last.parity);
    }
    ptx::bulk_prefetch(args.ahead + static_cast<int64_t>(blockIdx.x) * args.ahead_bytes,
                       args.ahead_bytes);
  }

 private:
  __device__ __forceinline__ void load() {
    const uint32_t barrier = ring.full_barrier[fill.stage];
    const bool two = kPairs && w.at.second && second.octets > 0;
    ptx::mbarrier_arrive_expect_tx(barrier, w.bytes() + (two ? second.bytes() : 0));
    ptx::bulk_load_once(ring.w(fill.stage), w.from, w.bytes(), barrier);
    if (two) {
      ptx::bulk_load_once(ring.w(fill.stage) + ring.group_bytes, second.from, second.bytes(),
                          barrier);
      second.next();
    }
    w.next();
    fill.advance(ring.stages);
  }
};

// Brings X, which the kernels before wrote, in whole boxes: what lies behind K comes as zeros.
__device__ __forceinline__ void load_x(const SplitKGemmArgs& args, const Ring& ring, int number) {
  const uint32_t box = args.x_atoms * kXAtomBytes;
  const int boxes = args.tiers[number].x_boxes;
  const bool flat = args.x_atoms == 1;  // the map
  RingPosition fill;
  fill.parity = 1;
  Cursor at(args, number);
  ptx::wait_for_dependencies();
  for (; !at.done(); at.next_stage()) {
    wait_barrier(ring.empty_barrier[fill.stage], fill.parity);
    const uint32_t barrier = (ring.windowed ? ring.x_barrier : ring.full_barrier)[fill.stage];
    uint32_t to = ring.x(fill.stage);
    ptx::mbarrier_arrive_expect_tx(barrier, boxes * box);
#pragma unroll 1
    for (int i = 0, atom = at.k; i < boxes; i++, atom += args.x_atoms, to += box) {
      ptx::tensor_load(to, &args.x, flat ? atom * kAtomK : 0, 0, flat ? 0 : atom, barrier);
    }
    fill.advance(ring.stages);
  }
}

__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring, int number,
                                        int warp, Moments& moments) {
  constexpr int kWarps = kWarpgroup / 32;
  const int warpgroup = warp / kWarps, other = 1 - warpgroup;
  const int first = ring.split ? warpgroup * kTileOctets : 0;
  const int group = ring.shared && !ring.split ? warpgroup : 0;
  const int warp_octet = first + warp % kWarps * 2;
  const Tier& tier = args.tiers[number];
  const int tier_octet = tier.first_octet, stage_atoms = tier.stage_atoms;
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
    const int octets = kPairs ? max(at.octets(group), 0) : at.octets();
    const int octet = tier_octet + at.octet + group * at.second + warp_octet;
    const Outputs outputs(args, octet * kOctetRows, octets - warp_octet);
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
               octets * kAtomBytes, ring.x(stage.stage), min(left, stage_atoms), sums);
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
    if (has_halves(args) && !add_halves(args, at.k > 0, octet, octets - warp_octet, sums)) continue;
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
  const bool idle = blockIdx.x >= args.tiers[args.tier_count].first_cta;  // it only fills an SM
  const Tier& tier = args.tiers[number];
  const Ring ring(args, tier, barriers);
  // Every thread waits for the kernels before, also those that read nothing of theirs: that this
  // kernel is complete then implies that those before it are, at any distance.
  if (idle) {
    const uint64_t start = ptx::globaltimer();
    ptx::wait_for_dependencies();
    while (ptx::globaltimer() - start < kIdleNs)
      ptx::sleep(100);
    return;
  }
  const bool copies = warp >= kConsumers / 32 && ptx::elect_one();
  Producer producer(args, ring, number);
  if (copies && warp == kConsumers / 32) {
    ring.initialize_w();
    producer.fill_ring(min(tier.window, tier.stages));
  } else if (copies) {
    ptx::prefetch_tensor_map(&args.x);
    ring.initialize_x();
  }
  __syncthreads();
  if (warp < kConsumers / 32) {
    consume(args, ring, number, warp, moments);
  } else if (copies && warp > kConsumers / 32) {
    load_x(args, ring, number);
  } else {
    if (copies) {
      producer.run();
      producer.look_ahead(args);
    }
    ptx::wait_for_dependencies();
  }
}
