// How the tiled GEMM's sums become outputs: bias, activation, residual. A thread has sums of one
// row of W, and rows of X, but Y's rows follow W's: so they are transposed on their way to Y.
#pragma once

#include "tiled_staging.cuh"

// Of a lane: those of rows g of row blocks 2w and 2w + 1, the same in all passes.
template <int passes>
struct Biases {
  Element of[2];

  __device__ __forceinline__ Biases(const TiledGemmArgs& args, const TilePart& part, int) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = (part.row_block + 2 * warp + i) * kRowsPerBlock + lane / 4;
      of[i] = args.bias && row < args.m ? args.bias[row] : Element();
    }
  }
  __device__ __forceinline__ const Element (&in(int) const)[2] { return of; }
};

// What a lane stages: rows of 8 x 8 matrices.
struct Stager {
  uint32_t plain, gated;  // of a block
  bool odd;               // whether the lane has what gates are multiplied with
  int source;             // the lane that has its gated outputs

  __device__ __forceinline__ Stager() {
    const uint32_t lane = lane_anew();
    plain = BlockRow<false>::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    gated = BlockRow<true>::place(lane, 0);
    odd = lane / 4 % 2;
    source = (lane / 4 % 4 * 2 + lane / 16) * 4 + lane % 4;
  }

  // The sums of tiles of 8 rows of X.
  template <Way way>
  __device__ __forceinline__ void stage(const TiledGemmArgs& args, const float2* sums,
                                        const Element (&biases)[2], uint32_t block) const {
    const float bias[2] = {to_float(biases[0]), to_float(biases[1])};
    if (way == kGated) {
      stage_gated(sums, bias, block + gated);
    } else {
      stage_plain<way>(args, sums, bias, block + plain);
    }
  }

 private:
  // Four matrices at a time: of two row blocks of W and 16 rows of X.
  template <Way way>
  __device__ __forceinline__ void stage_plain(const TiledGemmArgs& args, const float2* sums,
                                              const float (&bias)[2], uint32_t at) const {
    constexpr int kApart = 16 * kRowChunks * 16;
    uint32_t words[kPassTiles / 2][4];
    auto& all = reinterpret_cast<uint32_t (&)[2 * kPassTiles]>(words);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      if (way == kWithResidual) ptx::ldmatrix_x4_trans(words[i], at + i * kApart);
    outputs<way>(args, sums, [&](int i) { return float2{bias[i % 2], bias[i % 2]}; }, all);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      ptx::stmatrix_x4_trans(at + i * kApart, words[i]);
  }

  // Rows of W are gates and what they multiply in turn. Of lanes that have a gate and its partner
  // one takes both for row block 2w, the other for 2w + 1; then all those of 2w are put first.
  __device__ __forceinline__ void stage_gated(const float2* sums, const float (&bias)[2],
                                              uint32_t at) const {
    uint32_t words[kPassTiles];
#pragma unroll
    for (int i = 0; i < kPassTiles; i++) {
      float2 low = sums[2 * i], high = sums[2 * i + 1];
      low.x += bias[0], low.y += bias[0], high.x += bias[1], high.y += bias[1];
      const float2 given = odd ? low : high, own = odd ? high : low;
      const float2 other = {__shfl_xor_sync(0xffffffff, given.x, 4),
                            __shfl_xor_sync(0xffffffff, given.y, 4)};
      const float2 gate = odd ? other : own, up = odd ? own : other;
      const uint32_t word = packed(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y));
      words[i] = __shfl_sync(0xffffffff, word, source);
    }
    ptx::stmatrix_x4_trans(at, words);
  }
};
