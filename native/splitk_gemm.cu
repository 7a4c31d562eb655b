// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for N <= 64, the rows of W lying in several memory tiers.
//
// W is packed (dakrun/kernels/packing.py) in octets of 8 rows, the items, each of which lies in one
// tier. A CTA computes whole rows, in groups of octets, so no sum is ever split between CTAs, and
// the order of a sum's terms depends on K alone: neither tiers nor the number of CTAs change a bit
// of Y.
//
// Every CTA serves one tier. One warp keeps copies of W in flight into a ring of stages, one warp
// copies of X, and two teams of four warps multiply: the one takes the even blocks of k, the other
// the odd ones, so that the latency of a step hides behind the other team's work. Within a team each
// warp takes a quarter of the block's k for N <= 16, some octets and rows of X for more.

#include "common.cuh"

constexpr int kMaxTiers = 9;
constexpr int kMaxStages = 16;
constexpr int kTeamWarps = 4;
constexpr int kTeams = 2;
constexpr int kConsumerWarps = kTeams * kTeamWarps;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 64;
constexpr int kOctetRows = 8;
constexpr int kAtomK = 64;
constexpr int kAtomBytes = kOctetRows * kAtomK * 2;
constexpr int kMaxOctets = 8;  // of a group

// One cubin per dtype and N: -DBFLOAT16 is 0 or 1, N <= 8 * X_TILES.
#if BFLOAT16
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif
constexpr int kXRows = 8 * X_TILES;
constexpr int kXAtomBytes = kXRows * kAtomK * 2;
constexpr int kRowTiles = (X_TILES + 1) / 2;  // of 16 rows of X, the height of an mma
constexpr bool kSplitK = kRowTiles == 1;      // the warps of a team share k, or else rows
constexpr int kBlockK = kSplitK ? 128 : 64;   // what a team takes at a time
constexpr int kBlockAtoms = kBlockK / kAtomK;
constexpr int kRowWarps = kRowTiles == 4 ? 2 : 1;
constexpr int kOctetWarps = kSplitK ? 1 : kTeamWarps / kRowWarps;
constexpr int kWarpRowTiles = kRowTiles / kRowWarps;
constexpr int kWarpOctets = kMaxOctets / kOctetWarps;

// The race checker takes no account of __syncwarp(), so under it every lane arrives for itself.
#if RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

extern __shared__ __align__(1024) uint8_t smem[];

enum Activation : int { kNone = 0, kRelu = 1, kSiluMul = 2 };

// Of its octets a tier's CTAs take groups in turn: CTA c the groups c, c + CTAs, ... What they take
// at a time, a wave, is stored by steps of k, each step by groups, so that CTAs side by side read
// memory side by side. A group's step is [atoms along k][octets], 1 KiB each.
struct Tier {
  const uint8_t* base;
  int first_octet;  // octets of this tier: to the next tier's first
  int first_cta;
  int group_octets;  // at most kMaxOctets; the tier's last group may have fewer
  int step_k;        // a multiple of 128
  int window;        // stages of W that a CTA may have in flight
};

struct SplitKGemmArgs {
  TensorMap x;                // [K / 64][N][64], box of x_atoms x kXRows x 64, 128-byte swizzle
  Tier tiers[kMaxTiers + 1];  // one more, for the ends
  const Element* bias;        // [M], or null
  const Element* residual;    // [N, M], or null; not with kSiluMul
  Element* y;                 // [N, M]; [N, M / 2] with kSiluMul, see there
  int m, n, k;                // k counts the padding, a multiple of 128
  int tier_count;
  int stages;
  int stage_blocks;  // of kBlockK: an even number, or 1, and then `stages` is even
  int stage_octets;  // that a stage has room for
  int stage_bytes;   // of W and X, or of what finish() needs if that is more
  int x_atoms;       // of 64 k that a copy of X brings; 1: the map is [1][N][K], K being ragged
  int activation;
};

__device__ __forceinline__ int tier_of_cta(const SplitKGemmArgs& args) {
  int tier = 0;
  while (tier + 1 < args.tier_count && blockIdx.x >= args.tiers[tier + 1].first_cta) tier++;
  return tier;
}

// The stages of a CTA, one after the other: a group of octets, all its k, the next group.
struct Cursor {
  int stage_k, k_end, group_octets, wave_octets, tier_octets;
  int octet, k = 0;

  __device__ __forceinline__ Cursor(const SplitKGemmArgs& args, int number)
      : stage_k(args.stage_blocks * kBlockK), k_end(args.k) {
    const Tier &tier = args.tiers[number], &next = args.tiers[number + 1];
    group_octets = tier.group_octets;
    wave_octets = (next.first_cta - tier.first_cta) * group_octets;
    tier_octets = next.first_octet - tier.first_octet;
    octet = (static_cast<int>(blockIdx.x) - tier.first_cta) * group_octets;
  }
  __device__ __forceinline__ bool done() const { return octet >= tier_octets; }
  __device__ __forceinline__ int octets() const { return min(group_octets, tier_octets - octet); }
  __device__ __forceinline__ int blocks() const { return min(stage_k, k_end - k) / kBlockK; }
  __device__ __forceinline__ void next_group() { octet += wave_octets; }
  __device__ __forceinline__ void next_stage() {
    k += stage_k;
    if (k < k_end) return;
    k = 0;
    next_group();
  }
};

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
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t w(int stage) const { return first + stage * stage_bytes; }
  __device__ __forceinline__ uint32_t x(int stage) const { return w(stage) + w_bytes; }
};

// One thread: W does not depend on the kernels before.
__device__ __forceinline__ void produce_w(const SplitKGemmArgs& args, const Ring& ring,
                                          int number) {
  const Tier tier = args.tiers[number];
  const int first = (static_cast<int>(blockIdx.x) - tier.first_cta) * tier.group_octets;
  const int step_k = in_register(tier.step_k);
  RingPosition fill, landed;
  fill.parity = 1;  // the phase before an empty barrier's first: all stages start free
  int issued = 0;
  for (Cursor at(args, number); !at.done(); at.next_stage(), fill.advance(ring.stages), issued++) {
    if (ring.windowed && issued >= tier.window) {
      wait_barrier(ring.full_barrier[landed.stage], landed.parity);
      landed.advance(ring.stages);
    }
    const int octets = at.octets();
    const uint32_t bytes = octets * at.blocks() * kBlockAtoms * kAtomBytes;
    const int wave = at.octet - first, in_wave = min(at.wave_octets, at.tier_octets - wave);
    const int step = at.k / step_k * step_k, depth = min(step_k, at.k_end - step);
    const int64_t atoms = static_cast<int64_t>(wave) * (at.k_end / kAtomK) +
                          in_wave * (step / kAtomK) + first * (depth / kAtomK) +
                          octets * ((at.k - step) / kAtomK);
    wait_barrier(ring.empty_barrier[fill.stage], fill.parity);
    ptx::mbarrier_arrive_expect_tx(ring.full_barrier[fill.stage], bytes);
    ptx::bulk_load(ring.w(fill.stage), tier.base + atoms * kAtomBytes, bytes,
                   ring.full_barrier[fill.stage]);
  }
}

// One thread: X is what the kernels before wrote.
__device__ __forceinline__ void produce_x(const SplitKGemmArgs& args, const Ring& ring,
                                          int number) {
  const Barriers landed = ring.windowed ? ring.x_barrier : ring.full_barrier;
  RingPosition fill;
  fill.parity = 1;
  for (Cursor at(args, number); !at.done(); at.next_stage(), fill.advance(ring.stages)) {
    wait_barrier(ring.empty_barrier[fill.stage], fill.parity);
    const uint32_t barrier = landed[fill.stage];
    if (args.x_atoms > 1) {  // what lies behind K comes as zeros
      ptx::mbarrier_arrive_expect_tx(barrier, args.x_atoms * kXAtomBytes);
      ptx::tensor_load(ring.x(fill.stage), &args.x, 0, 0, at.k / kAtomK, barrier);
    } else {
      const int atoms = at.blocks() * kBlockAtoms;
      ptx::mbarrier_arrive_expect_tx(barrier, atoms * kXAtomBytes);
#pragma unroll 1
      for (int i = 0; i < atoms; i++) {
        ptx::tensor_load(ring.x(fill.stage) + i * kXAtomBytes, &args.x, at.k + i * kAtomK, 0, 0,
                         barrier);
      }
    }
  }
}

// Sums of one thread, lane 4g + t: of rows g (x, y) and g + 8 (z, w) of each 16 rows of X, with the
// rows 2t (x, z) and 2t + 1 (y, w) of each octet.
struct Sums {
  float4 tile[kWarpRowTiles][kWarpOctets] = {};
};

// Where a lane's rows of W's octets and of X start, for the first 16 bytes that it reads of them:
// in the swizzled rows of 128 bytes another 16, 32 or 64 are reached by an exclusive or.
struct LaneOffsets {
  uint32_t w, x[kWarpRowTiles];

  // The warp's rows of X start at `first_row`.
  __device__ __forceinline__ LaneOffsets(int lane, int first_row) {
    const int row = lane % 8;
    w = row * 128 + ((lane / 8 ^ row) << 4);
#pragma unroll
    for (int i = 0; i < kWarpRowTiles; i++) {
      if (X_TILES == 1) {  // rows 8 to 15 of the tile are none: four chunks of 8 rows at once
        x[i] = w;
      } else {  // of an odd number of 8 rows the last are read twice, and that is never stored
        const int x_row = min(first_row + 16 * i + lane % 16, kXRows - 8 + row);
        x[i] = x_row * 128 + ((lane / 16 ^ row) << 4);
      }
    }
  }
};

// Multiplies 32 k of the atoms at `w` (of the first of `octets`) and `x` in shared memory: the first
// half of their 64, or with `half` 64 the second.
__device__ __forceinline__ void multiply(uint32_t w, uint32_t x, uint32_t half,
                                         const LaneOffsets& lane, int octets, Sums& sums) {
  uint32_t a[kWarpRowTiles][2][4];
#pragma unroll
  for (int i = 0; i < kWarpRowTiles; i++) {
    if (X_TILES == 1) {
      uint32_t rows[4];
      ptx::ldmatrix_x4(rows, x + (lane.x[i] ^ half));
      a[i][0][0] = rows[0], a[i][0][2] = rows[1], a[i][1][0] = rows[2], a[i][1][2] = rows[3];
      a[i][0][1] = a[i][0][3] = a[i][1][1] = a[i][1][3] = 0;
    } else {
#pragma unroll
      for (int step = 0; step < 2; step++) {
        ptx::ldmatrix_x4(a[i][step], x + (lane.x[i] ^ half ^ 32 * step));
      }
    }
  }
  // Several octets at a time, so that their reads of shared memory overlap; where there are fewer,
  // what lies behind them in the stage is read, and what that gives never stored.
  constexpr int kAtOnce = X_TILES == 8 ? 2 : kWarpOctets < 4 ? kWarpOctets : 4;
  w += lane.w ^ half;
#pragma unroll
  for (int first = 0; first < kWarpOctets; first += kAtOnce) {
    if (first > 0 && first >= octets) break;
    uint32_t b[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) ptx::ldmatrix_x4(b[j], w + (first + j) * kAtomBytes);
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
#pragma unroll
        for (int i = 0; i < kWarpRowTiles; i++) {
          ptx::mma(sums.tile[i][first + j], a[i][step], b[j][2 * step], b[j][2 * step + 1],
                   Element());
        }
      }
    }
  }
}

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void convert(__half& to, float value) { to = __float2half_rn(value); }
__device__ __forceinline__ void convert(__nv_bfloat16& to, float value) {
  to = __float2bfloat16_rn(value);
}

// Two neighbouring outputs, of rows `m` and m + 1 of W, m being even, and row `n` of X. With
// kSiluMul even rows are gates and the odd ones what they multiply: silu(gate) * up.
__device__ __forceinline__ void store(const SplitKGemmArgs& args, int m, int n, float first,
                                      float second) {
  if (m >= args.m || n >= args.n) return;
  const bool pair = m + 1 < args.m;
  if (args.bias) {
    first += to_float(args.bias[m]);
    if (pair) second += to_float(args.bias[m + 1]);
  }
  if (args.activation == kSiluMul) {
    convert(args.y[static_cast<int64_t>(n) * (args.m / 2) + m / 2],
            __fdividef(first, 1.0f + __expf(-first)) * second);
    return;
  }
  const int64_t at = static_cast<int64_t>(n) * args.m + m;
  if (args.activation == kRelu) first = fmaxf(first, 0.0f), second = fmaxf(second, 0.0f);
  if (args.residual) {
    first += to_float(args.residual[at]);
    if (pair) second += to_float(args.residual[at + 1]);
  }
  convert(args.y[at], first);
  if (pair) convert(args.y[at + 1], second);
}

__device__ __forceinline__ void add(float4& to, const float4& more) {
  to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
}

// What a warp of a team computes of a group: `count` octets from `first` on, and rows of X from
// `first_column` on.
struct Share {
  int most, first, count, first_column;  // most: of any warp

  __device__ __forceinline__ Share(int member, int octets) {
    most = (octets + kOctetWarps - 1) / kOctetWarps;
    first = kSplitK ? 0 : min(member / kRowWarps * most, octets);
    count = min(most, octets - first);
    first_column = kSplitK ? 0 : member % kRowWarps * kWarpRowTiles * 16;
  }
};

// Adds what the two teams have, and for kSplitK what the warps of a team have, by way of a stage
// that everybody has read, `scratch`; stores the group's outputs, from `first_row` of W on.
__device__ __forceinline__ void finish(const SplitKGemmArgs& args, float4* scratch, int first_row,
                                       int octets, const Share& mine, Sums& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int member = warp % kTeamWarps, team = warp / kTeamWarps;
  auto slot = [&](int tile, int of) { return scratch + (tile * kTeamWarps + of) * 32 + lane; };
  ptx::named_barrier_sync(1, kConsumers);
  for (int turn = kTeams - 1; turn >= 0; turn--) {
    if (team == turn) {
#pragma unroll
      for (int i = 0; i < kWarpRowTiles; i++) {
#pragma unroll
        for (int j = 0; j < kWarpOctets; j++) {
          if (j < mine.count) {
            float4* const at = slot(i * mine.most + j, member);
            if (team == 0) add(sums.tile[i][j], *at);
            *at = sums.tile[i][j];
          }
        }
      }
    }
    ptx::named_barrier_sync(1, kConsumers);
  }
  const int tiles = kWarpRowTiles * mine.most * (kSplitK ? 1 : kTeamWarps);
#pragma unroll 1
  for (int number = warp; number < tiles; number += kConsumerWarps) {
    const int tile = kSplitK ? number : number / kTeamWarps;
    const int of = kSplitK ? 0 : number % kTeamWarps;
    const Share share(of, octets);
    const int octet = tile % mine.most;
    if (octet >= share.count) continue;
    float4 sum = *slot(tile, of);
#pragma unroll
    for (int i = 1; kSplitK && i < kTeamWarps; i++) add(sum, *slot(tile, i));
    const int row = first_row + kOctetRows * (share.first + octet) + 2 * (lane % 4);
    const int column = share.first_column + tile / mine.most * 16 + lane / 4;
    store(args, row, column, sum.x, sum.y);
    if (X_TILES > 1) store(args, row, column + 8, sum.z, sum.w);
  }
  ptx::fence_proxy_async();  // the next copy into the stage comes after these accesses
  ptx::named_barrier_sync(1, kConsumers);
}

// The stages that a team reads: every other one, `stages` being even, or all.
struct TeamRing {
  const uint32_t full_barrier, x_barrier, empty_barrier, w;  // of the first
  const int turns, step_bytes, step_barriers;
  const bool windowed;
  int turn = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ TeamRing(const Ring& ring, int first, int step)
      : full_barrier(ring.full_barrier[first]),
        x_barrier(ring.x_barrier[first]),
        empty_barrier(ring.empty_barrier[first]),
        w(ring.w(first)),
        turns(in_register(ring.stages / step)),
        step_bytes(in_register(step * ring.stage_bytes)),
        step_barriers(in_register(step * 8)),
        windowed(ring.windowed) {}

  // The address of the stage, once all of it has landed.
  __device__ __forceinline__ uint32_t wait() const {
    wait_barrier(full_barrier + turn * step_barriers, parity);
    if (windowed) wait_barrier(x_barrier + turn * step_barriers, parity);
    return w + turn * step_bytes;
  }
  // Gives the stage back and goes on to the next.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (kArrivalsOfWarp == 32 || threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(empty_barrier + turn * step_barriers);
    }
    if (++turn == turns) {
      turn = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring, int number) {
  const int warp = threadIdx.x / 32;
  const int member = warp % kTeamWarps, team = warp / kTeamWarps;
  const int tier_octet = args.tiers[number].first_octet;
  const bool alternate = args.stage_blocks == 1;  // a stage is one team's, or else both teams'
  const int step = alternate ? kTeams : 1;
  const int w_bytes = in_register(ring.w_bytes);
  const int all_blocks = in_register(args.k / kBlockK), stage_blocks = args.stage_blocks;
  const int stages_of_group = (all_blocks + stage_blocks - 1) / stage_blocks;
  const LaneOffsets lane(threadIdx.x % 32, Share(member, 0).first_column);
  TeamRing own(ring, alternate ? team : 0, step);
  int passed = 0;  // stages of the groups before
  for (Cursor at(args, number); !at.done(); at.next_group(), passed += stages_of_group) {
    const int octets = in_register(at.octets()), w_atom = octets * kAtomBytes;
    const Share share(member, octets);
    const int w_offset = share.first * kAtomBytes + (kSplitK ? member / 2 * w_atom : 0);
    const int x_offset = w_bytes + (kSplitK ? member / 2 * kXAtomBytes : 0);
    Sums sums;
    auto block = [&](uint32_t w, uint32_t x) {
#pragma unroll(X_TILES >= 6 ? 1 : 2)  // more would not fit the registers of two CTAs an SM
      for (int half = 0; half < (kSplitK ? 1 : 2); half++) {
        multiply(w, x, 64 * (kSplitK ? member % 2 : half), lane, share.count, sums);
      }
    };
    // The last stage is kept until the sums have been exchanged in it.
    const int last = stages_of_group - 1;
    bool keeps = true;
    if (alternate) {
      int stage = (passed + team) % kTeams;
      for (; stage < last; stage += kTeams) {
        const uint32_t w = own.wait();
        block(w + w_offset, w + x_offset);
        own.release();
      }
      keeps = stage == last;
      if (keeps) {
        const uint32_t w = own.wait();
        block(w + w_offset, w + x_offset);
      }
    } else {
      for (int stage = 0; stage <= last; stage++) {
        const uint32_t w = own.wait();
        const int blocks = min(stage_blocks, all_blocks - stage * stage_blocks);
#pragma unroll 1
        for (int i = team; i < blocks; i += kTeams) {
          const int atom = i * kBlockAtoms;
          block(w + w_offset + atom * w_atom, w + x_offset + atom * kXAtomBytes);
        }
        if (stage < last) own.release();
      }
    }
    const int kept = (passed + last) % ring.stages;
    finish(args, reinterpret_cast<float4*>(smem + kept * ring.stage_bytes),
           (tier_octet + at.octet) * kOctetRows, octets, share, sums);
    if (keeps) own.release();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    splitk_gemm(const __grid_constant__ SplitKGemmArgs args) {
  __shared__ uint64_t barriers[3 * kMaxStages];
  if (blockIdx.x >= args.tiers[args.tier_count].first_cta) {  // it only fills an SM
    ptx::launch_dependents();
    ptx::wait_for_dependencies();
    return;
  }
  const int tier = tier_of_cta(args);
  const Ring ring(args, barriers, args.tiers[tier].window);
  if (threadIdx.x == kConsumers) {
    ptx::prefetch_tensor_map(&args.x);
    ring.initialize(args.stage_blocks);
  }
  __syncthreads();
  ptx::launch_dependents();
  if (threadIdx.x == kConsumers) produce_w(args, ring, tier);
  // Every thread waits, also those that read nothing: that this kernel is complete then implies
  // that those before it are, at any distance.
  ptx::wait_for_dependencies();
  if (threadIdx.x < kConsumers) {
    consume(args, ring, tier);
  } else if (threadIdx.x == kConsumers + 32) {
    produce_x(args, ring, tier);
  }
}
