// How the tiled GEMM's sums pass from one CTA to another: in the middle of a tile's atoms, or,
// where CTAs of a cluster sum segments of them, at the end.
#pragma once

#if WIDE
#include "wide_epilogue.cuh"
#else
#include "tiled_epilogue.cuh"
#endif

static_assert(Sums::kSets == 1, "sums are in one set");

constexpr int kWarps = kConsumers / 32;
constexpr int kPartTiles = 4;  // what one CTA adds the segments of
constexpr int kParts = X_TILES / kPartTiles;
constexpr int kPartBytes = kPartTiles * kConsumers * 16;

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

// A tile's segments, whose CTAs each add some parts of all of them. They meet where the stages are,
// in shared memory, [segments][parts of the CTA][tiles][threads].
struct Segments {
  const uint32_t address;
  const int number, count, sharers, sharer;  // of CTAs beside each other in the cluster
  const int parts;                           // of a CTA, at most

  __device__ __forceinline__ Segments(const TiledGemmArgs& args, const Place& place,
                                      uint32_t address)
      : address(address),
        number(place.segment),
        count(args.k_ctas),
        sharers(place.sharers),
        sharer(place.sharer),
        parts((kParts + args.k_ctas - 1) / args.k_ctas) {}

  // Nobody may read stages any more.
  __device__ __forceinline__ void give(const Sums& sums) const {
    int owner = 0, part = 0;
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      const uint32_t to = ptx::in_cta(at(number, part), owner * sharers + sharer);
#pragma unroll
      for (int j = 0; j < kPartTiles; j++) {
        const float2 a = sums.tile[0][2 * (i * kPartTiles + j)];
        const float2 b = sums.tile[0][2 * (i * kPartTiles + j) + 1];
        ptx::store_in_cta(to + j * kConsumers * 16, {a.x, a.y, b.x, b.y});
      }
      if (++owner == count) owner = 0, part++;
    }
  }

  // All have given theirs.
  __device__ __forceinline__ void put(const TileOutputs& outputs) const {
#pragma unroll 1
    for (int part = 0; number + part * count < kParts; part++) {
      float2 sums[2 * kPartTiles] = {};
#pragma unroll 1
      for (int i = 0; i < count; i++) {
        const float4* const from =
            reinterpret_cast<const float4*>(smem + (at(i, part) - ptx::smem_address(smem)));
#pragma unroll
        for (int j = 0; j < kPartTiles; j++) {
          const float4 more = from[j * kConsumers];
          sums[2 * j].x += more.x, sums[2 * j].y += more.y;
          sums[2 * j + 1].x += more.z, sums[2 * j + 1].y += more.w;
        }
      }
      outputs.put_tiles<kPartTiles>(sums, (number + part * count) * kPartTiles);
    }
  }

 private:
  __device__ __forceinline__ uint32_t at(int segment, int part) const {
    return address + (segment * parts + part) * kPartBytes + threadIdx.x * 16;
  }
};
