// From accumulators to blocks of outputs in shared memory, for variants whose warpgroups multiply
// 64 rows of W (tiled_wide_epilogue.cuh has the others). A thread's accumulators belong to two rows
// of W and many of X, but a row of Y holds the outputs of one row of X and all rows of W, so they
// are transposed on the way.
#pragma once

#include "tiled_staging.cuh"

// The biases of lane 4g + t of warp w: row g of row blocks 2w and 2w + 1, the same in all passes.
template <int passes>
struct Biases {
  Element of[2];

  __device__ __forceinline__ Biases(const TiledGemmArgs& args, const WarpgroupTile& tile, int) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = (tile.row_block + 2 * warp + i) * kRowsPerBlock + lane / 4;
      of[i] = args.bias && row < args.m ? args.bias[row] : Element();
    }
  }
  __device__ __forceinline__ const Element (&in(int) const)[2] { return of; }
};

// Writes a lane's outputs of a pass to a block, as rows of 8 x 8 matrices.
struct Stager {
  uint32_t plain, gated;  // offsets in a block
  bool odd;               // whether the lane's rows of W are ups, not gates
  int source;             // the lane that computes the gated outputs that this lane writes

  __device__ __forceinline__ Stager() {
    const uint32_t lane = opaque_lane();
    plain = BlockRow<false>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    gated = BlockRow<true>::offset(lane, 0);
    odd = lane / 4 % 2;
    source = (lane / 4 % 4 * 2 + lane / 16) * 4 + lane % 4;
  }

  // `acc` are a pass's accumulators: kPassTiles tiles of 8 rows of X.
  template <EpilogueKind kind>
  __device__ __forceinline__ void stage(const TiledGemmArgs& args, const float2* acc,
                                        const Element (&biases)[2], uint32_t block) const {
    const float bias[2] = {to_float(biases[0]), to_float(biases[1])};
    if (kind == kGated) {
      stage_gated(acc, bias, block + gated);
    } else {
      stage_plain<kind>(args, acc, bias, block + plain);
    }
  }

 private:
  // Four matrices at a time: two row blocks of W by 16 rows of X.
  template <EpilogueKind kind>
  __device__ __forceinline__ void stage_plain(const TiledGemmArgs& args, const float2* acc,
                                              const float (&bias)[2], uint32_t at) const {
    constexpr int kApart = 16 * kRowChunks * 16;
    uint32_t words[kPassTiles / 2][4];
    auto& all = reinterpret_cast<uint32_t (&)[2 * kPassTiles]>(words);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      if (kind == kWithResidual) ptx::ldmatrix_x4_trans(words[i], at + i * kApart);
    apply_epilogue<kind>(args, acc, [&](int i) { return float2{bias[i % 2], bias[i % 2]}; }, all);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      ptx::stmatrix_x4_trans(at + i * kApart, words[i]);
  }

  // silu(gate) * up. Rows of W are gates and ups in turn, so that two lanes have a gate and its up:
  // one of them takes both for row block 2w, the other for 2w + 1. Then the outputs of 2w are moved
  // to the first lanes.
  __device__ __forceinline__ void stage_gated(const float2* acc, const float (&bias)[2],
                                              uint32_t at) const {
    uint32_t words[kPassTiles];
#pragma unroll
    for (int i = 0; i < kPassTiles; i++) {
      float2 first = acc[2 * i], second = acc[2 * i + 1];  // of row blocks 2w and 2w + 1
      first.x += bias[0], first.y += bias[0], second.x += bias[1], second.y += bias[1];
      const float2 given = odd ? first : second, own = odd ? second : first;
      const float2 other = {__shfl_xor_sync(0xffffffff, given.x, 4),
                            __shfl_xor_sync(0xffffffff, given.y, 4)};
      const float2 gate = odd ? other : own, up = odd ? own : other;
      const uint32_t word = packed(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y));
      words[i] = __shfl_sync(0xffffffff, word, source);
    }
    ptx::stmatrix_x4_trans(at, words);
  }
};
