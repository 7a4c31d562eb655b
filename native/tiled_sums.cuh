// How the tiled GEMM's sums pass from one CTA to another: in the middle of a tile's atoms, or,
// where there are several segments of K, at the end.
#pragma once

#include "tiled_epilogue.cuh"

static_assert(Sums::kSets == 1, "sums are in one set");

constexpr int kWarps = kConsumers / 32;
constexpr int kPartTiles = 4;  // of X: what one CTA adds the segments of
constexpr int kParts = X_TILES / kPartTiles;
constexpr int kTogether = 4;  // segments whose sums are read at once

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

// A warpgroup's sums of a tile's segment, which it leaves in a workspace, and those of all segments,
// which the warpgroups that had them each add some of: every CTA comes to run, as there are no more
// of them than there is room for.
struct Segments {
  const TiledGemmArgs& args;
  const TileOutputs& outputs;
  const int segment;

  __device__ __forceinline__ Segments(const TiledGemmArgs& args, const TileOutputs& outputs,
                                      const Tiles& tile)
      : args(args), outputs(outputs), segment(tile.segment) {}

  __device__ __forceinline__ void give(const Sums& sums) const {
    const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x) % kWarpgroup;
    const int pairs = (args.n - outputs.n + 15) / 16;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (!exists(thread, j)) continue;
      float4* const to = at(segment, thread, j);
#pragma unroll
      for (int i = 0; i < X_TILES / 2; i++) {
        const float2 a = sums.tile[0][4 * i + j], b = sums.tile[0][4 * i + 2 + j];
        if (i < pairs) to[i * 32] = {a.x, a.y, b.x, b.y};
      }
    }
    outputs.staging.sync();
    if (thread == 0) ptx::add_in_order(flag(), 1);
  }

  __device__ __forceinline__ void put() const {
    const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x) % kWarpgroup;
    if (thread == 0) {
      while (ptx::load_acquire(flag()) < args.segments)
        ;
    }
    outputs.staging.sync();
#pragma unroll 1
    for (int part = segment; part < kParts; part += args.segments) {
      const int row = part * kPartTiles * 8, pairs = (args.n - outputs.n - row + 15) / 16;
      if (pairs <= 0) break;
      float2 sums[2 * kPartTiles] = {};
#pragma unroll 1
      for (int first = 0; first < args.segments; first += kTogether) {
        float4 more[kTogether][2][kPartTiles / 2];
#pragma unroll
        for (int i = 0; i < kTogether; i++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float4* const from = at(first + i, thread, j) + part * kPartTiles / 2 * 32;
            const bool there = first + i < args.segments && exists(thread, j);
#pragma unroll
            for (int pair = 0; pair < kPartTiles / 2; pair++)
              more[i][j][pair] = ptx::load_from_l2_or_zero(from + pair * 32, there && pair < pairs);
          }
        }
#pragma unroll
        for (int i = 0; i < kTogether; i++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int pair = 0; pair < kPartTiles / 2; pair++) {
              float2 &a = sums[4 * pair + j], &b = sums[4 * pair + 2 + j];
              a.x += more[i][j][pair].x, a.y += more[i][j][pair].y;
              b.x += more[i][j][pair].z, b.y += more[i][j][pair].w;
            }
          }
        }
      }
      outputs.put_rows<kPartTiles>(sums, row);
    }
    // The last one that is done with them makes the flag what it was.
    if (thread == 0 && ptx::add_in_order(flag(), 1) == 2 * args.segments - 1) *flag() = 0;
  }

 private:
  __device__ __forceinline__ int octets() const {
    return (args.m + kOctetRows - 1) / kOctetRows;
  }
  // Whether there is octet 2w + j of warp w.
  __device__ __forceinline__ bool exists(uint32_t thread, int j) const {
    return thread / 32 * 2 + j < outputs.octets;
  }
  // A lane's sums of that octet, from the first rows of X on.
  __device__ __forceinline__ float4* at(int segment, uint32_t thread, int j) const {
    const int octet = outputs.octet + thread / 32 * 2 + j, pairs = (args.n + 15) / 16;
    const int64_t number = static_cast<int64_t>(segment * octets() + octet) * pairs;
    return args.carried + (number + outputs.n / 16) * 32 + thread % 32;
  }
  __device__ __forceinline__ int* flag() const {
    const int blocks = (args.n + kXRows - 1) / kXRows;
    return args.flags + outputs.octet * blocks + outputs.n / kXRows;
  }
};
