// How the tiled GEMM's sums become outputs: bias, activation, residual. A thread has sums of one
// row of W, and rows of X, but Y's rows follow W's: so they are transposed on their way to Y.
#pragma once

#include "tiled_staging.cuh"

// The outputs of a warpgroup's rows of W and of X.
struct TileOutputs {
  const TiledGemmArgs& args;
  const Staging& staging;
  const int column, columns;  // of Y: the first one, and how many there are
  const int n;                // the first row
  Element bias[2];            // of rows g of octets 2w and 2w + 1, read ahead of the sums

  // `octets` of W exist from `octet` on.
  __device__ __forceinline__ TileOutputs(const TiledGemmArgs& args, const Staging& staging,
                                         int octet, int octets, int n)
      : args(args),
        staging(staging),
        column(octet * kOctetRows / gates(args)),
        columns(min(octets * kOctetRows, args.m - octet * kOctetRows) / gates(args)),
        n(n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = (octet + 2 * warp + i) * kOctetRows + lane / 4;
      if (args.bias && row < args.m) bias[i] = args.bias[row];
    }
  }

  __device__ __forceinline__ void put(const Sums& sums) const {
    constexpr int kPassTiles = kPassRows / 8;
#pragma unroll
    for (int tile = 0; tile < X_TILES; tile += kPassTiles)
      put_tiles<kPassTiles>(sums.tile[0] + 2 * tile, tile);
  }

  // Of tiles of 8 rows of X, from the warpgroup's `tile` on.
  template <int tiles>
  __device__ __forceinline__ void put_tiles(const float2* sums, int tile) const {
    const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x) % kWarpgroup;
    const int first = n + 8 * tile;
    const OutputBlock block = {first, min(8 * tiles, args.n - first), column, columns};
    const int chunks = kRowChunks / gates(args);
    if (block.rows <= 0) return;
    if (args.activation == kSiluMul) {
      stage_gated<tiles>(sums, thread);
    } else {
      if (args.residual) {
        staging.move<false>(args, block, chunks, thread);
        staging.sync();
      }
      stage<tiles>(sums, thread);
    }
    staging.sync();
    staging.move<true>(args, block, chunks, thread);
    staging.sync();
  }

 private:
  __device__ __forceinline__ float bias_of(int octet) const {
    return args.bias ? to_float(bias[octet]) : 0.0f;
  }

  // Four 8 x 8 matrices at a time: of two octets of W and 16 rows of X.
  template <int tiles>
  __device__ __forceinline__ void stage(const float2* sums, uint32_t thread) const {
    const uint32_t lane = thread % 32, warp = thread / 32;
    uint32_t at = staging.chunk(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < tiles; i += 2, at += 16 * kRowBytes) {
      uint32_t words[4];
      if (args.residual) ptx::ldmatrix_x4_trans(words, at);
#pragma unroll
      for (int j = 0; j < 4; j++)
        words[j] = output(args, sums[2 * i + j], {bias_of(j % 2), bias_of(j % 2)}, words[j]);
      ptx::stmatrix_x4_trans(at, words);
    }
  }

  // Rows of W are gates and what they multiply in turn. Of lanes that have a gate and its partner
  // one takes both for octet 2w, the other for 2w + 1. So a chunk has the outputs of two octets,
  // those of the first one at even places.
  template <int tiles>
  __device__ __forceinline__ void stage_gated(const float2* sums, uint32_t thread) const {
    const uint32_t lane = thread % 32, warp = thread / 32;
    const bool odd = lane / 4 % 2;
    uint32_t at = staging.chunk(lane, warp);
#pragma unroll
    for (int i = 0; i < tiles; i += 4, at += 32 * kRowBytes) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 low = sums[2 * (i + j)], high = sums[2 * (i + j) + 1];
        low.x += bias_of(0), low.y += bias_of(0), high.x += bias_of(1), high.y += bias_of(1);
        const float2 given = odd ? low : high, own = odd ? high : low;
        const float2 other = {__shfl_xor_sync(0xffffffff, given.x, 4),
                              __shfl_xor_sync(0xffffffff, given.y, 4)};
        const float2 gate = odd ? other : own, up = odd ? own : other;
        words[j] = packed(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y));
      }
      ptx::stmatrix_x4_trans(at, words);
    }
  }
};
