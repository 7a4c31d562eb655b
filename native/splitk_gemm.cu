// Y[N, M] = epilogue(X[N, K] W[M, K]^T) for N <= 64, the rows of W lying in several memory tiers.
//
// W is packed (dakrun/kernels/packing.py) in octets of 8 rows; an octet is one item, lies in one
// tier and is contiguous: atoms of 8 rows x 64 k, 1 KiB each, exactly what a 128-byte swizzle makes
// of them in shared memory. A CTA computes whole rows, in groups of octets, so no sum is ever split
// between CTAs, and the order of a sum's terms depends on K alone: neither tiers nor the number of
// CTAs change a bit of Y.
//
// Every CTA serves one tier: a producer warp keeps copies of W and X in flight into a ring of
// stages, four consumer warps multiply. For N <= 16 each consumer warp takes a quarter of every
// stage's k, for larger N a quarter of its octets.

#include "common.cuh"

constexpr int kMaxTiers = 9;
constexpr int kMaxStages = 16;
constexpr int kConsumerWarps = 4;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kOctetRows = 8;
constexpr int kAtomK = 64;
constexpr int kAtomBytes = kOctetRows * kAtomK * 2;
// One cubin per dtype and N: -DBFLOAT16 is 0 or 1, N <= 8 * X_TILES.
#if BFLOAT16
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif
constexpr int kXRows = 8 * X_TILES;
constexpr int kRowTiles = (X_TILES + 1) / 2;  // of 16 rows of X, the height of an mma
constexpr bool kSplitK = kRowTiles == 1;      // the consumer warps share k, or else the octets
constexpr int kMaxOctets = kSplitK ? 8 : 16;  // of a group
constexpr int kBlockK = kSplitK ? 128 : 64;  // the steps in which k is counted
constexpr int kBlockAtoms = kBlockK / kAtomK;
constexpr int kWarpOctets = kSplitK ? kMaxOctets : kMaxOctets / kConsumerWarps;

extern __shared__ __align__(1024) uint8_t smem[];

enum Activation : int { kNone = 0, kRelu = 1, kSiluMul = 2 };

struct Tier {
  const uint8_t* base;
  int first_octet;  // octets of this tier: to the next tier's first
  int first_cta;
  int cta_octets;    // of each CTA, but for the last
  int group_octets;  // that are computed together, at most kMaxOctets
  int window;        // stages of W that a CTA may have in flight
};

struct SplitKGemmArgs {
  TensorMap x;                // [N, K], box of kXRows rows x 64 k, 128-byte swizzle
  Tier tiers[kMaxTiers + 1];  // one more, for the ends
  const Element* bias;        // [M], or null
  const Element* residual;    // [N, M], or null; not with kSiluMul
  Element* y;                 // [N, M]; [N, M / 2] with kSiluMul, see there
  int m, n, k;                // k counts the padding, a multiple of 128
  int tier_count;
  int stages;
  int stage_k;       // a multiple of kBlockK
  int stage_octets;  // that a stage has room for
  int activation;
};

__device__ __forceinline__ int tier_of_cta(const SplitKGemmArgs& args) {
  int tier = 0;
  while (tier + 1 < args.tier_count && blockIdx.x >= args.tiers[tier + 1].first_cta) tier++;
  return tier;
}

// The stages of a CTA, one after the other: a group of octets, all its k, the next group.
struct Cursor {
  int stage_k, k_end, group_octets, end;  // end: behind the CTA's last octet, within its tier
  int octet, k = 0;

  __device__ __forceinline__ Cursor(const SplitKGemmArgs& args, int number)
      : stage_k(args.stage_k), k_end(args.k) {
    const Tier& tier = args.tiers[number];
    const int here = args.tiers[number + 1].first_octet - tier.first_octet;
    group_octets = tier.group_octets;
    octet = (static_cast<int>(blockIdx.x) - tier.first_cta) * tier.cta_octets;
    end = min(octet + tier.cta_octets, here);
  }
  __device__ __forceinline__ bool done() const { return octet >= end; }
  __device__ __forceinline__ int octets() const { return min(group_octets, end - octet); }
  __device__ __forceinline__ int depth() const { return min(stage_k, k_end - k); }
  // Goes to the next stage; true where another group begins.
  __device__ __forceinline__ bool advance() {
    k += stage_k;
    if (k < k_end) return false;
    k = 0;
    octet += group_octets;
    return true;
  }
};

struct Ring {
  uint64_t* w_barrier;      // [stages]: W has landed
  uint64_t* x_barrier;      // [stages]: X has landed
  uint64_t* empty_barrier;  // [stages]: all consumer warps are done with it
  int w_bytes, stage_bytes;

  __device__ __forceinline__ uint8_t* w(int stage) const { return smem + stage * stage_bytes; }
  __device__ __forceinline__ uint8_t* x(int stage) const { return w(stage) + w_bytes; }
};

// Both are called by the whole producer warp; its lanes issue the copies side by side.

__device__ __forceinline__ void load_w(const Tier& tier, const Ring& ring, const Cursor& at,
                                       int stage, int64_t octet_bytes) {
  const int lane = threadIdx.x % 32;
  const uint32_t bytes = at.depth() / kAtomK * kAtomBytes;
  if (lane == 0) ptx::mbarrier_arrive_expect_tx(&ring.w_barrier[stage], at.octets() * bytes);
  __syncwarp();
  if (lane < at.octets()) {
    const uint8_t* source =
        tier.base + (at.octet + lane) * octet_bytes + at.k / kAtomK * kAtomBytes;
    ptx::bulk_load(ring.w(stage) + lane * (at.stage_k / kAtomK * kAtomBytes), source, bytes,
                   &ring.w_barrier[stage]);
  }
}

__device__ __forceinline__ void load_x(const SplitKGemmArgs& args, const Ring& ring,
                                       const Cursor& at, int stage) {
  constexpr int kBoxBytes = kXRows * kAtomK * 2;
  const int lane = threadIdx.x % 32, boxes = at.depth() / kAtomK;
  if (lane == 0) ptx::mbarrier_arrive_expect_tx(&ring.x_barrier[stage], boxes * kBoxBytes);
  __syncwarp();
  if (lane < boxes) {
    ptx::tensor_load(ring.x(stage) + lane * kBoxBytes, &args.x, at.k + lane * kAtomK, 0,
                     &ring.x_barrier[stage]);
  }
}

__device__ __forceinline__ void produce(const SplitKGemmArgs& args, const Ring& ring, int number) {
  const Tier tier = args.tiers[number];
  const int64_t octet_bytes = static_cast<int64_t>(args.k / kAtomK) * kAtomBytes;
  Cursor at(args, number), x_at(args, number);
  RingPosition fill, landed, x_fill;
  fill.parity = 1;  // the phase before an empty barrier's first: all stages start free
  const int window = min(tier.window, args.stages);
  int issued = 0;
  for (; !at.done() && issued < args.stages; issued++, at.advance(), fill.advance(args.stages)) {
    if (issued >= window) {
      wait_barrier(&ring.w_barrier[landed.stage], landed.parity);
      landed.advance(args.stages);
    }
    load_w(tier, ring, at, fill.stage, octet_bytes);
  }
  // The ring is full of weights; X is what the kernels before wrote.
  ptx::wait_for_dependencies();
  for (int i = 0; i < issued; i++, x_at.advance(), x_fill.advance(args.stages)) {
    load_x(args, ring, x_at, x_fill.stage);
  }
  fill = RingPosition();
  for (; !at.done(); at.advance(), fill.advance(args.stages)) {
    if (window < args.stages) {
      wait_barrier(&ring.w_barrier[landed.stage], landed.parity);
      landed.advance(args.stages);
    }
    wait_barrier(&ring.empty_barrier[fill.stage], fill.parity);
    load_w(tier, ring, at, fill.stage, octet_bytes);
    load_x(args, ring, at, fill.stage);
  }
}

// Sums of one thread, lane 4g + t: of rows g (x, y) and g + 8 (z, w) of each 16 rows of X, with the
// rows 2t (x, z) and 2t + 1 (y, w) of each octet.
struct Sums {
  float4 tile[kRowTiles][kWarpOctets] = {};
};

// Multiplies 32 k, those of atom `atom` from chunk `chunk` (16 bytes each) on.
__device__ __forceinline__ void multiply(const Ring& ring, int stage, int atom, int chunk,
                                         int first_octet, int octets, int octet_stride,
                                         Sums& sums) {
  const int lane = threadIdx.x % 32, swizzle = lane % 8;  // the row of an atom or of X, mod 8
  const uint32_t x = ptx::smem_address(ring.x(stage)) + atom * kXRows * 128;
  uint32_t a[kRowTiles][2][4];
  if (X_TILES == 1) {  // rows 8 to 15 of the tile are none
    uint32_t half[4];
    ptx::ldmatrix_x4(half, x + swizzle * 128 + (((chunk + lane / 8) ^ swizzle) << 4));
    a[0][0][0] = half[0], a[0][0][2] = half[1], a[0][1][0] = half[2], a[0][1][2] = half[3];
    a[0][0][1] = a[0][0][3] = a[0][1][1] = a[0][1][3] = 0;
  } else {
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) {
      // Of an odd number of 8 rows the last are read twice; what they give is never stored.
      const int row = min(16 * i + lane % 16, kXRows - 8 + swizzle);
#pragma unroll
      for (int step = 0; step < 2; step++) {
        ptx::ldmatrix_x4(a[i][step],
                         x + row * 128 + (((chunk + 2 * step + lane / 16) ^ swizzle) << 4));
      }
    }
  }
  const uint32_t w = ptx::smem_address(ring.w(stage)) + atom * kAtomBytes + swizzle * 128 +
                     (((chunk + lane / 8) ^ swizzle) << 4);
  // Four octets at a time, so that their reads of shared memory overlap; where there are fewer the
  // last is read again, and what that gives is never stored.
#pragma unroll
  for (int first = 0; first < kWarpOctets; first += 4) {
    if (first >= octets) break;
    uint32_t b[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      ptx::ldmatrix_x4(b[j], w + (first_octet + min(first + j, octets - 1)) * octet_stride);
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int i = 0; i < kRowTiles; i++) {
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

// Adds the sums that the consumer warps have of their quarters of k, by way of the stage that all
// of them have just read, and stores the outputs.
__device__ __forceinline__ void finish_split_k(const SplitKGemmArgs& args, uint8_t* scratch,
                                               int first_row, int octets, const Sums& sums) {
  float4* partial = reinterpret_cast<float4*>(scratch);  // [octets][warps][lanes]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::named_barrier_sync(1, kConsumers);
#pragma unroll
  for (int j = 0; j < kWarpOctets; j++) {
    if (j < octets) partial[(j * kConsumerWarps + warp) * 32 + lane] = sums.tile[0][j];
  }
  ptx::named_barrier_sync(1, kConsumers);
  for (int j = warp; j < octets; j += kConsumerWarps) {
    float4 sum = partial[j * kConsumerWarps * 32 + lane];
    for (int other = 1; other < kConsumerWarps; other++) {
      const float4 more = partial[(j * kConsumerWarps + other) * 32 + lane];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    const int row = first_row + kOctetRows * j + 2 * (lane % 4);
    store(args, row, lane / 4, sum.x, sum.y);
    if (X_TILES > 1) store(args, row, lane / 4 + 8, sum.z, sum.w);
  }
  ptx::fence_proxy_async();  // the next copy into this stage comes after these writes
}

__device__ __forceinline__ void finish(const SplitKGemmArgs& args, int first_row, int octets,
                                       const Sums& sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kWarpOctets; j++) {
    if (j < octets) {
      const int row = first_row + kOctetRows * j + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kRowTiles; i++) {
        store(args, row, 16 * i + lane / 4, sums.tile[i][j].x, sums.tile[i][j].y);
        store(args, row, 16 * i + lane / 4 + 8, sums.tile[i][j].z, sums.tile[i][j].w);
      }
    }
  }
}

__device__ __forceinline__ void consume(const SplitKGemmArgs& args, const Ring& ring, int number) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tier_octet = args.tiers[number].first_octet;
  const int octet_stride = args.stage_k / kAtomK * kAtomBytes;
  ptx::wait_for_dependencies();  // the residual is read and y is written here
  RingPosition drain;
  for (Cursor at(args, number); !at.done();) {
    const int first_row = (tier_octet + at.octet) * kOctetRows;
    const int octets = at.octets();
    // With kSplitK all octets are this warp's, else a quarter, rounded up.
    const int quarter = (octets + kConsumerWarps - 1) / kConsumerWarps;
    const int mine = kSplitK ? 0 : min(warp * quarter, octets);
    const int count = kSplitK ? octets : min(quarter, octets - mine);
    Sums sums;
    bool more = true;
    while (more) {
      const int blocks = at.depth() / kBlockK;
      wait_barrier(&ring.x_barrier[drain.stage], drain.parity);
      wait_barrier(&ring.w_barrier[drain.stage], drain.parity);
      for (int block = 0; block < blocks; block++) {
        if (kSplitK) {
          multiply(ring, drain.stage, block * kBlockAtoms + warp / 2, warp % 2 * 4, 0, octets,
                   octet_stride, sums);
        } else {
#pragma unroll 1
          for (int half = 0; half < 2; half++) {
            multiply(ring, drain.stage, block, 4 * half, mine, count, octet_stride, sums);
          }
        }
      }
      more = !at.advance();
      if (!more && kSplitK) {
        finish_split_k(args, ring.w(drain.stage), first_row, octets, sums);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&ring.empty_barrier[drain.stage]);
      drain.advance(args.stages);
    }
    if (!kSplitK) finish(args, first_row + kOctetRows * mine, count, sums);
  }
}

extern "C" __global__ void __launch_bounds__(kConsumers + 32, 2)
    splitk_gemm(const __grid_constant__ SplitKGemmArgs args) {
  __shared__ uint64_t barriers[3 * kMaxStages];
  const int w_bytes = args.stage_octets * (args.stage_k / kAtomK) * kAtomBytes;
  const Ring ring = {barriers, barriers + kMaxStages, barriers + 2 * kMaxStages, w_bytes,
                     w_bytes + args.stage_k * kXRows * 2};
  if (threadIdx.x == kConsumers) {
    ptx::prefetch_tensor_map(&args.x);
    for (int i = 0; i < args.stages; i++) {
      ptx::mbarrier_init(&ring.w_barrier[i], 1);
      ptx::mbarrier_init(&ring.x_barrier[i], 1);
      ptx::mbarrier_init(&ring.empty_barrier[i], kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::launch_dependents();
  const int tier = tier_of_cta(args);
  if (threadIdx.x < kConsumers) {
    consume(args, ring, tier);
  } else {
    produce(args, ring, tier);
  }
}
