// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for N <= 64, the rows of W lying in several memory tiers.
//
// W is packed (dakrun/kernels/packing.py) in octets of 8 rows, the items, each of which lies in one
// tier. A CTA computes whole rows, in groups of octets, so no sum is ever split between CTAs, and
// the order of a sum's terms depends on K alone: neither tiers nor the number of CTAs change a bit
// of Y.
//
// Every CTA serves one tier. One thread keeps copies of W and X in flight into a ring of stages,
// and eight warps multiply, in two teams of four: the one takes the even blocks of k, the other the
// odd ones, so that the latency of a step hides behind the other team's work. Within a team the
// warps share a block's k for few rows of X, its octets and rows of X for many.

#include "gemm_epilogue.cuh"
#include "splitk_gemm.cuh"

// A stage is W, [atoms][octets][8 rows][128 bytes], then X, [atoms][rows][128 bytes].
struct Ring {
  Barriers full_barrier;   // [stages]: W, and with it X, has landed
  Barriers x_barrier;      // [stages]: X has landed, where the window is to count W alone
  Barriers empty_barrier;  // [stages]: all warps that read the stage are done with it
  uint32_t first;
  int stages, w_bytes, stage_bytes;
  bool windowed;

  __device__ __forceinline__ Ring(const SplitKGemmArgs& args, uint64_t* barriers, int window)
      : full_barrier{ptx::smem_address(barriers)},
        x_barrier{full_barrier[kMaxStages]},
        empty_barrier{full_barrier[2 * kMaxStages]},
        first(ptx::smem_address(smem)),
        stages(args.stages),
        w_bytes(args.stage_octets * args.stage_blocks * kBlockAtoms * kAtomBytes),
        stage_bytes(args.stage_bytes),
        windowed(window < args.stages) {}

  __device__ __forceinline__ void initialize(int stage_blocks) const {
    for (int i = 0; i < stages; i++) {
      ptx::mbarrier_init(full_barrier[i], windowed ? 1 : 2);
      ptx::mbarrier_init(x_barrier[i], 1);
      ptx::mbarrier_init(empty_barrier[i],
                         (stage_blocks == 1 ? kTeamWarps : kConsumerWarps) * kArrivalsOfWarp);
    }
  }
  __device__ __forceinline__ uint32_t w(int stage) const { return first + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t x(int stage) const { return w(stage) + w_bytes; }
  __device__ __forceinline__ uint32_t end() const { return w(stages); }
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
    const uint32_t bytes = octets * w.blocks() * kBlockAtoms * kAtomBytes;
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

  __device__ __forceinline__ void load_x() {
    const uint32_t barrier = (ring.windowed ? ring.x_barrier : ring.full_barrier)[fill_x.stage];
    const uint32_t to = ring.x(fill_x.stage);
    if (args.x_atoms > 1) {  // what lies behind K comes as zeros
      ptx::mbarrier_arrive_expect_tx(barrier, args.x_atoms * kXAtomBytes);
      ptx::tensor_load(to, &args.x, 0, 0, x.k / kAtomK, barrier);
    } else {
      const int atoms = x.blocks() * kBlockAtoms;
      ptx::mbarrier_arrive_expect_tx(barrier, atoms * kXAtomBytes);
#pragma unroll 1
      for (int i = 0; i < atoms; i++) {
        ptx::tensor_load(to + i * kXAtomBytes, &args.x, x.k + i * kAtomK, 0, 0, barrier);
      }
    }
    x.next_stage();
    fill_x.advance(ring.stages);
  }
};

// Multiplies kWarpK of an atom's k. `w` and `x` are where the lane's row of the warp's first two
// octets and of its first rows of X starts in shared memory, with the first 16 bytes that it reads
// of them: in swizzled rows of 128 bytes the others are reached by an exclusive or. Octets go by
// twos, the 16 rows of an mma; where there is but one, what lies behind it in the stage is read,
// and what that gives never stored.
__device__ __forceinline__ void multiply(uint32_t w, uint32_t x, int octets, Sums& sums) {
#pragma unroll
  for (int half = 0; half < kWarpK; half += 32) {
    uint32_t b[kWarpTiles][4];
#pragma unroll
    for (int i = 0; i < kWarpTiles; i++)
      ptx::ldmatrix_x4(b[i], (x ^ 2 * half) + i * 8 * 128);
#pragma unroll
    for (int j = 0; j < kWarpOctets; j += 2) {
      if (j > 0 && j >= octets) break;
      uint32_t a[2][4];
#pragma unroll
      for (int step = 0; step < 2; step++) {
        ptx::ldmatrix_x4(a[step], (w ^ (2 * half + 32 * step)) + j * kAtomBytes);
      }
#pragma unroll
      for (int step = 0; step < 2; step++) {
#pragma unroll
        for (int i = 0; i < kWarpTiles; i++) {
          ptx::mma(sums.tile[j][i], sums.tile[j + 1][i], a[step], b[i][2 * step],
                   b[i][2 * step + 1], Element());
        }
      }
    }
  }
}

__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring, int number) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / kTeamWarps;
  const int tier_octet = args.tiers[number].first_octet;
  const int stages = in_register(ring.stages), stage_blocks = in_register(args.stage_blocks);
  const int stage_bytes = in_register(ring.stage_bytes);
  const int blocks_of_group = in_register(args.k / kBlockK);
  const int stages_of_group = in_register((blocks_of_group + stage_blocks - 1) / stage_blocks);
  // A stage of one block is one team's, a longer one both teams'.
  const int step = in_register(stage_blocks == 1 ? kTeams : 1);
  const int first_block = in_register(stage_blocks == 1 ? 0 : team);
  const int first_stage = stage_blocks == 1 ? team : 0;
  const uint32_t full_barrier = in_register(ring.full_barrier.first);
  const bool windowed = in_register(ring.windowed), arrives = in_register(arrives_for_warp());
  // Lanes of ldmatrix: of W the second eight read the second octet, and the second sixteen the next
  // 8 k; of X every eight read 8 k more. A warp's k lie in an atom of their own, or in half of one.
  const Share fixed(warp, 0);
  const int row = lane % 8, half = fixed.k * kWarpK % kAtomK * 2, atom = fixed.k * kWarpK / kAtomK;
  const uint32_t lane_w = row * 128 + (((lane / 16 ^ row) << 4) ^ half) + lane / 8 % 2 * kAtomBytes;
  const uint32_t lane_x = (fixed.first_row + row) * 128 + (((lane / 8 ^ row) << 4) ^ half);
  const uint32_t first_x = in_register(ring.first + ring.w_bytes + atom * kXAtomBytes + lane_x);
  const Exchange exchange{smem + stages * stage_bytes};
  int passed = 0;  // stages of the groups before
  for (Cursor at(args, number); !at.done(); at.next_group(), passed += stages_of_group) {
    const int octets = at.octets();
    const Share share(warp, octets);
    const int w_block = in_register(octets * kBlockAtoms * kAtomBytes);
    const uint32_t first_w =
        in_register(ring.first + (atom * octets + share.first) * kAtomBytes + lane_w);
    Sums sums;
    int slot = (passed + first_stage) % stages;
    uint32_t parity = (passed + first_stage) / stages & 1;
#pragma unroll 1
    for (int stage = first_stage; stage < stages_of_group; stage += step) {
      const uint32_t barrier = full_barrier + 8 * slot, offset = slot * stage_bytes;
      wait_barrier(barrier, parity);
      if (windowed) wait_barrier(barrier + 8 * kMaxStages, parity);
      const int blocks = min(stage_blocks, blocks_of_group - stage * stage_blocks);
#pragma unroll 1
      for (int i = first_block; i < blocks; i += kTeams) {
        multiply(first_w + offset + i * w_block, first_x + offset + i * kBlockAtoms * kXAtomBytes,
                 share.count, sums);
      }
      __syncwarp();
      if (arrives) ptx::mbarrier_arrive(barrier + 2 * 8 * kMaxStages);
      slot += step;
      if (slot >= stages) slot -= stages, parity ^= 1;
    }
    exchange.finish(args, (tier_octet + at.octet) * kOctetRows, octets, share, sums);
  }
}

// Two CTAs to an SM, that of this op and that of the next; elsewhere the largest N would spill.
#if X_TILES == 8 && __CUDA_ARCH__ != 900
constexpr int kCtasOfSm = 1;
#else
constexpr int kCtasOfSm = 2;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtasOfSm)
    splitk_gemm(const __grid_constant__ SplitKGemmArgs args) {
  __shared__ uint64_t barriers[3 * kMaxStages];
  const int tier = tier_of_cta(args);
  const bool idle = blockIdx.x >= args.tiers[args.tier_count].first_cta;  // it only fills an SM
  const Ring ring(args, barriers, args.tiers[tier].window);
  if (threadIdx.x == kConsumers) {
    ptx::prefetch_tensor_map(&args.x);
    ring.initialize(args.stage_blocks);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::launch_dependents();
  // Every thread waits, also those that read nothing: that this kernel is complete then implies
  // that those before it are, at any distance.
  if (threadIdx.x == kConsumers && !idle) {
    Producer producer(args, ring, tier);
    producer.fill();
    ptx::wait_for_dependencies();
    producer.run();
  } else {
    ptx::wait_for_dependencies();
    if (threadIdx.x < kConsumers && !idle) consume(args, ring, tier);
  }
}
