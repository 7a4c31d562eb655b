// How the tiled GEMM's sums pass from one CTA to another: in the middle of a tile's atoms, or,
// where CTAs of a cluster sum segments of them, at the end.
#pragma once

#include "tiled_output.cuh"

static_assert(Sums::kSets == 1, "sums are in one set");

constexpr int kWarps = kConsumers / 32;
constexpr int kPassBytes = kPassTiles * kConsumers * 16;

// Every warp leaves its own, for the same one of the CTA that follows.
__device__ __forceinline__ void leave_sums(const TiledGemmArgs& args, const Sums& sums) {
  const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x);
  float4* const to = args.carried + blockIdx.x * X_TILES * kConsumers + thread;
#pragma unroll
  for (int i = 0; i < X_TILES; i++) {
    const float2 a = sums.tile[0][2 * i], b = sums.tile[0][2 * i + 1];
    to[i * kConsumers] = {a.x, a.y, b.x, b.y};
  }
  __syncwarp();
  if (thread % 32 == 0) ptx::store_release(args.flags + blockIdx.x * kWarps + thread / 32, 1);
}

// What the one before has left, or else zeros. There is no branch: ptxas would serialize products.
__device__ __forceinline__ void take_sums(const TiledGemmArgs& args, int cluster_size, bool left,
                                          Sums& sums) {
  const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x), cta = blockIdx.x - cluster_size;
  if (left) {
    if (thread % 32 == 0) {
      int* const flag = args.flags + cta * kWarps + thread / 32;
      while (ptx::load_acquire(flag) == 0)
        ;
      *flag = 0;
    }
    __syncwarp();
  }
  const float4* const from = args.carried + cta * X_TILES * kConsumers + thread;
#pragma unroll
  for (int i = 0; i < X_TILES; i++) {
    const float4 both = ptx::load_from_l2_or_zero(from + i * kConsumers, left);
    sums.tile[0][2 * i] = {both.x, both.y};
    sums.tile[0][2 * i + 1] = {both.z, both.w};
  }
}

// The first pass of the calling warp whose segments its CTA adds. Each warp begins with another
// CTA's, so that all get as many where there are fewer passes than CTAs.
__device__ __forceinline__ int first_pass(const TiledGemmArgs& args, const Place& place) {
  const int warp = ptx::anew<uint32_t>(threadIdx.x) / 32;
  const int first = place.segment - warp + quotient(warp, args.k_ctas) * args.k_ctas;
  return first < 0 ? first + args.k_ctas : first;
}

// How the CTAs that sum a tile's segments know of each other.
struct SegmentBarriers {
  static constexpr int kCount = kWarps + 2;

  const Barriers given;  // [warps]: what others give the same warp has come

  __device__ __forceinline__ explicit SegmentBarriers(uint32_t first) : given{first} {}

  // All warps that multiply, of all these CTAs, have read their last stage.
  __device__ __forceinline__ uint32_t drained() const { return given[kWarps]; }
  // Those of CTAs that share stages have read what they were given, too.
  __device__ __forceinline__ uint32_t added() const { return given[kWarps + 1]; }

  // By a thread.
  __device__ __forceinline__ void initialize(int segments, int sharers) const {
    for (int i = 0; i < kWarps; i++)
      ptx::mbarrier_init(given[i], 1);
    ptx::mbarrier_init(drained(), kWarps * segments);
    ptx::mbarrier_init(added(), kWarps * (sharers > 1 ? sharers : kArrivalsOfWarp));
    ptx::fence_mbarrier_init();
  }
};

// The phases of these barriers that a warp waits for.
struct SegmentParities {
  uint32_t tile = 0, given = 0;
};

// A tile's segments, whose CTAs each add those of some passes. They meet where the stages are, in
// shared memory, [segments][passes of the CTA][tiles][threads]: every thread gives to its like in
// the other CTAs.
struct Segments {
  const SegmentBarriers& barriers;
  const uint32_t address;
  const int number, count, sharers, sharer;  // of CTAs beside each other in the cluster
  const int first;                           // pass of the CTA, in this warp
  const int passes;                          // of a CTA, at most
  const int own;                             // passes of this warp's
  SegmentParities& parities;

  __device__ __forceinline__ Segments(const TiledGemmArgs& args, const Place& place,
                                      const SegmentBarriers& barriers, uint32_t address,
                                      SegmentParities& parities)
      : barriers(barriers),
        address(address),
        number(place.segment),
        count(args.k_ctas),
        sharers(place.sharers),
        sharer(place.sharer),
        first(first_pass(args, place)),
        passes(quotient(kPasses + args.k_ctas - 1, args.k_ctas)),
        own(first < kPasses - (passes - 1) * count ? passes : passes - 1),
        parities(parities) {}

  // By every warp that has read the tile's last stage, until all have. Those that have nothing to
  // give wait, too: else they might arrive for the next tile instead of others for this one.
  __device__ __forceinline__ void drain() const {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    if (lane < count) ptx::mbarrier_arrive_cluster(barriers.drained(), rank(lane));
    wait_barrier(barriers.drained(), parities.tile);
  }

  __device__ __forceinline__ void give(const Sums& sums) const {
    const int warp = threadIdx.x / 32;
    const uint32_t given = barriers.given[warp];
    if (threadIdx.x % 32 == 0 && own > 0)
      ptx::mbarrier_arrive_expect_tx(given, own * (count - 1) * kPassBytes / kWarps);
    int owner = number - first, turn = 0, left = count;
    if (owner < 0) owner += count;
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      const uint32_t at_owner = ptx::in_cta(at(number, turn), rank(owner)),
                     given_owner = ptx::in_cta(given, rank(owner));
#pragma unroll
      for (int i = 0; i < kPassTiles; i++) {
        const float2 a = sums.tile[0][2 * (pass * kPassTiles + i)];
        const float2 b = sums.tile[0][2 * (pass * kPassTiles + i) + 1];
        const float4 both = {a.x, a.y, b.x, b.y};
        if (owner == number) {
          here(number, turn)[i * kConsumers] = both;
        } else {
          ptx::store_in_cta(at_owner + i * kConsumers * 16, both, given_owner);
        }
      }
      if (++owner == count) owner = 0;
      if (--left == 0) left = count, turn++;
    }
  }

  // Adds what this CTA has been given.
  template <Way way>
  __device__ __forceinline__ void put(const TileOutputs& outputs) {
    if (own > 0) {
      wait_barrier(barriers.given[threadIdx.x / 32], parities.given);
      parities.given ^= 1;
    }
    Passes<way> all = outputs.passes<way>();
    all.begin_staging();
    const Stager stager;
#pragma unroll 1
    for (int pass = first, turn = 0; pass < all.count; pass += count, turn++) {
      const Biases<1> biases(outputs.args, outputs.part, pass);
      float2 sums[2 * kPassTiles] = {};
#pragma unroll 1
      for (int segment = 0; segment < count; segment++) {
        const float4* const from = here(segment, turn);
#pragma unroll
        for (int i = 0; i < kPassTiles; i++) {
          const float4 more = from[i * kConsumers];
          sums[2 * i].x += more.x, sums[2 * i].y += more.y;
          sums[2 * i + 1].x += more.z, sums[2 * i + 1].y += more.w;
        }
      }
      const uint32_t block = all.take(turn);
      stager.stage<way>(outputs.args, sums, biases.in(0), block);
      all.pass_on(block, pass, all.outputs.are_boxes(pass + 1));
    }
  }

  // By a warp that has nothing more to read of the tile, if another one follows.
  __device__ __forceinline__ void pass_on(bool last) {
    parities.tile ^= 1;
    if (last) return;
    ptx::fence_proxy_async();  // before copies into stages
    __syncwarp();
    if (sharers == 1) {
      if (arrives_for_warp()) ptx::mbarrier_arrive(barriers.added());
    } else if (threadIdx.x % 32 < sharers) {
      ptx::mbarrier_arrive_cluster(barriers.added(), number * sharers + threadIdx.x % 32);
    }
  }

 private:
  __device__ __forceinline__ int rank(int segment) const { return segment * sharers + sharer; }
  __device__ __forceinline__ float4* here(int segment, int turn) const {
    return reinterpret_cast<float4*>(smem + (at(segment, turn) - ptx::smem_address(smem)));
  }
  __device__ __forceinline__ uint32_t at(int segment, int turn) const {
    return address + (segment * passes + turn) * kPassBytes + threadIdx.x * 16;
  }
};
