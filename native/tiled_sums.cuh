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

// A tile's segments, whose CTAs each add those of some passes. They meet where the stages are, in
// shared memory, [segments][passes of the CTA][tiles][threads].
struct Segments {
  const uint32_t address;
  const int number, count, sharers, sharer;  // of CTAs beside each other in the cluster
  const int passes;                          // of a CTA, at most

  __device__ __forceinline__ Segments(const TiledGemmArgs& args, const Place& place,
                                      uint32_t address)
      : address(address),
        number(place.segment),
        count(args.k_ctas),
        sharers(place.sharers),
        sharer(place.sharer),
        passes((kPasses + args.k_ctas - 1) / args.k_ctas) {}

  // Nobody may read stages any more.
  __device__ __forceinline__ void give(const Sums& sums) const {
    int owner = 0, turn = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      const uint32_t to = ptx::in_cta(at(number, turn), owner * sharers + sharer);
#pragma unroll
      for (int i = 0; i < kPassTiles; i++) {
        const float2 a = sums.tile[0][2 * (pass * kPassTiles + i)];
        const float2 b = sums.tile[0][2 * (pass * kPassTiles + i) + 1];
        ptx::store_in_cta(to + i * kConsumers * 16, {a.x, a.y, b.x, b.y});
      }
      if (++owner == count) owner = 0, turn++;
    }
  }

  // All have given theirs.
  template <Way way>
  __device__ __forceinline__ void put(const TileOutputs& outputs) const {
    Passes<way> all = outputs.passes<way>();
    all.begin_staging();
    const Stager stager;
#pragma unroll 1
    for (int pass = number, turn = 0; pass < all.count; pass += count, turn++) {
      const Biases<1> biases(outputs.args, outputs.part, pass);
      float2 sums[2 * kPassTiles] = {};
#pragma unroll 1
      for (int segment = 0; segment < count; segment++) {
        const float4* const from =
            reinterpret_cast<const float4*>(smem + (at(segment, turn) - ptx::smem_address(smem)));
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

 private:
  __device__ __forceinline__ uint32_t at(int segment, int turn) const {
    return address + (segment * passes + turn) * kPassBytes + threadIdx.x * 16;
  }
};
