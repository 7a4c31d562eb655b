// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for N <= 64, the rows of W lying in several memory tiers.
//
// W is packed (dakrun/kernels/packing.py) in octets of 8 rows, the items, each of which lies in one
// tier. A CTA computes whole rows, in groups of octets, so no sum is ever split between CTAs, and
// the order of a sum's terms depends on K alone: neither tiers nor the number of CTAs change a bit
// of Y.
//
// Every CTA serves one tier. One thread keeps copies of W and X in flight into a ring of stages,
// and two warpgroups multiply. Of groups of more than 8 octets each takes its part, so that X is
// read once for both; smaller ones they take in turns, one storing while the other multiplies.

#include "gemm_epilogue.cuh"
#include "gemm_multiply.cuh"
#include "splitk_gemm.cuh"

constexpr int kTurnBarrier = 1;  // and the next: where warpgroups wait for their turn

// A stage is W, [atoms][octets][8 rows][128 bytes], then X, [atoms][rows][128 bytes].
struct Ring {
  Barriers full_barrier;   // [stages]: W, and with it X, has landed
  Barriers x_barrier;      // [stages]: X has landed, where the window is to count W alone
  Barriers empty_barrier;  // [stages]: all warps that read the stage are done with it
  uint32_t first;
  int stages, w_bytes, stage_bytes;
  bool windowed;
  bool split;  // the warpgroups share groups

  __device__ __forceinline__ Ring(const Tier& tier, uint64_t* barriers)
      : full_barrier{ptx::smem_address(barriers)},
        x_barrier{full_barrier[kMaxStages]},
        empty_barrier{full_barrier[2 * kMaxStages]},
        first(ptx::smem_address(smem)),
        stages(tier.stages),
        w_bytes(tier.group_octets * tier.stage_atoms * kAtomBytes),
        stage_bytes(w_bytes + tier.stage_atoms * kXAtomBytes),
        windowed(tier.window < tier.stages),
        split(tier.group_octets > kTileOctets) {}

  __device__ __forceinline__ void initialize() const {
    for (int i = 0; i < stages; i++) {
      ptx::mbarrier_init(full_barrier[i], windowed ? 1 : 2);
      ptx::mbarrier_init(x_barrier[i], 1);
      ptx::mbarrier_init(empty_barrier[i],
                         (split ? kConsumers : kWarpgroup) / 32 * kArrivalsOfWarp);
    }
  }
  __device__ __forceinline__ uint32_t w(int stage) const { return first + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t x(int stage) const { return w(stage) + w_bytes; }
};

// One thread's work: the copies into the ring.
struct Producer {
  const SplitKGemmArgs& args;
  const Ring& ring;
  const Tier tier;
  const int first;  // octet of a wave that is the CTA's first
  const int window;
  Cursor w, x;
  RingPosition fill_w, fill_x, landed;

  __device__ __forceinline__ Producer(const SplitKGemmArgs& args, const Ring& ring, int number)
      : args(args),
        ring(ring),
        tier(args.tiers[number]),
        first((static_cast<int>(blockIdx.x) - tier.first_cta) * tier.group_octets),
        window(min(tier.window, ring.stages)),
        w(args, number),
        x(args, number) {}

  // The first stages of W, which do not depend on the kernels before.
  __device__ __forceinline__ void fill() {
    for (int issued = 0; issued < window && !w.done(); issued++)
      load_w();
  }

  // All else; X is what the kernels before wrote.
  __device__ __forceinline__ void run() {
    for (int issued = 0; issued < window && !x.done(); issued++)
      load_x();
    for (int issued = window; !x.done(); issued++) {
      if (ring.windowed) {
        wait_barrier(ring.full_barrier[landed.stage], landed.parity);
        landed.advance(ring.stages);
      }
      if (issued >= ring.stages) {
        wait_barrier(ring.empty_barrier[fill_w.stage], fill_w.parity ^ 1);
      }
      load_w();
      load_x();
    }
  }

 private:
  __device__ __forceinline__ void load_w() {
    const int octets = w.octets();
    const uint32_t bytes = octets * w.atoms() * kAtomBytes;
    const int wave = w.octet - first, in_wave = min(w.wave_octets, w.tier_octets - wave);
    const int step = w.k / tier.step_k * tier.step_k, depth = min(tier.step_k, args.k - step);
    const int64_t atoms = static_cast<int64_t>(wave) * (args.k / kAtomK) +
                          in_wave * (step / kAtomK) + first * (depth / kAtomK) +
                          octets * ((w.k - step) / kAtomK);
    const uint32_t barrier = ring.full_barrier[fill_w.stage];
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    ptx::bulk_load(ring.w(fill_w.stage), tier.base + atoms * kAtomBytes, bytes, barrier);
    w.next_stage();
    fill_w.advance(ring.stages);
  }

  // Whole boxes: what lies behind K comes as zeros.
  __device__ __forceinline__ void load_x() {
    const uint32_t barrier = (ring.windowed ? ring.x_barrier : ring.full_barrier)[fill_x.stage];
    const uint32_t to = ring.x(fill_x.stage), box = args.x_atoms * kXAtomBytes;
    const int boxes = (x.atoms() + args.x_atoms - 1) / args.x_atoms;
    const bool flat = args.x_atoms == 1;  // the map
    ptx::mbarrier_arrive_expect_tx(barrier, boxes * box);
#pragma unroll 1
    for (int i = 0; i < boxes; i++) {
      const int atom = x.k / kAtomK + i * args.x_atoms;
      ptx::tensor_load(to + i * box, &args.x, flat ? atom * kAtomK : 0, 0, flat ? 0 : atom, barrier);
    }
    x.next_stage();
    fill_x.advance(ring.stages);
  }
};

__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring, int number,
                                        int warp) {
  constexpr int kWarps = kWarpgroup / 32;
  const int warpgroup = warp / kWarps, other = 1 - warpgroup;
  const int first = ring.split ? warpgroup * kTileOctets : 0;
  const int warp_octet = first + warp % kWarps * 2;
  const Tier& tier = args.tiers[number];
  const int tier_octet = tier.first_octet, stage_atoms = tier.stage_atoms;
  const int atoms_of_group = args.k / kAtomK;
  const int stages_of_group = (atoms_of_group + stage_atoms - 1) / stage_atoms;
  const bool arrives = kArrivalsOfWarp == 32 || threadIdx.x % 32 == 0;
  int turn = 0;
  for (Cursor at(args, number); !at.done(); at.next_group(), turn++) {
    if (!ring.split && turn % kWarpgroups != warpgroup) continue;
    const int octets = at.octets();
    const Outputs outputs(args, (tier_octet + at.octet + warp_octet) * kOctetRows,
                          octets - warp_octet);
    if (!ring.split && turn > 0) ptx::named_barrier_sync(kTurnBarrier + warpgroup, kConsumers);
    Sums sums;
    const int passed = turn * stages_of_group;
    RingPosition stage{passed % ring.stages, passed / ring.stages % 2u};
    uint32_t before = 0;  // the barrier of the stage before, to be freed
#pragma unroll 1
    for (int left = atoms_of_group; left > 0; left -= stage_atoms) {
      wait_barrier(ring.full_barrier[stage.stage], stage.parity);
      if (ring.windowed) wait_barrier(ring.x_barrier[stage.stage], stage.parity);
      multiply(ring.w(stage.stage) + first * kAtomBytes, octets * kAtomBytes, ring.x(stage.stage),
               min(left, stage_atoms), sums);
      wait_but_for_last();
      __syncwarp();
      if (before && arrives) ptx::mbarrier_arrive(before);
      before = ring.empty_barrier[stage.stage];
      stage.advance(ring.stages);
    }
    wait_for(sums);
    __syncwarp();
    if (arrives) ptx::mbarrier_arrive(before);
    if (!ring.split && !at.last_group()) {
      ptx::named_barrier_arrive(kTurnBarrier + other, kConsumers);
    }
    outputs.put(sums);
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
  const int tier = tier_of_cta(args);
  const bool idle = blockIdx.x >= args.tiers[args.tier_count].first_cta;  // it only fills an SM
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the compiler sees it is uniform
  const Ring ring(args.tiers[tier], barriers);
  if (threadIdx.x == kConsumers) {
    ptx::prefetch_tensor_map(&args.x);
    ring.initialize();
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::launch_dependents();
  // Every thread waits, also those that read nothing: that this kernel is complete then implies
  // that those before it are, at any distance.
  if (warp < kConsumers / 32) {
    ptx::wait_for_dependencies();
    if (!idle) consume(args, ring, tier, warp);
  } else if (threadIdx.x == kConsumers && !idle) {
    Producer producer(args, ring, tier);
    producer.fill();
    ptx::wait_for_dependencies();
    producer.run();
  } else {
    ptx::wait_for_dependencies();
  }
}
