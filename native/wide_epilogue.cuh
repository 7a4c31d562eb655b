// How the sums of wide tiles become outputs: bias, activation, residual. A thread has sums of two
// rows of X, and two rows of each row block of W.
#pragma once

#include "tiled_staging.cuh"

// Of a lane: those of rows 2t and 2t + 1 of each row block of some passes.
template <int passes>
struct Biases {
  uint32_t of[passes][kPassTiles];

  // One after the other, with no branch between them: none waits for another.
  __device__ __forceinline__ Biases(const TiledGemmArgs& args, const TilePart& part, int first) {
    const int row_block = part.row_block + first * kPassTiles;
    const int row = row_block * kRowsPerBlock + threadIdx.x % 4 * 2;
    const int rows = args.bias ? args.m - row : 0;
#pragma unroll
    for (int i = 0; i < passes * kPassTiles; i++) {
      uint32_t& to = of[i / kPassTiles][i % kPassTiles];
      to = 0;
      if (i * kRowsPerBlock + 1 < rows) {
        to = *reinterpret_cast<const uint32_t*>(args.bias + row + i * kRowsPerBlock);
      }
    }
    if (rows % 2 == 0) return;
#pragma unroll
    for (int i = 0; i < passes * kPassTiles; i++) {
      if (i * kRowsPerBlock + 1 != rows) continue;
      of[i / kPassTiles][i % kPassTiles] = load_unaligned(args.bias + args.m - 1, false);
    }
  }
  __device__ __forceinline__ const uint32_t (&in(int pass) const)[kPassTiles] { return of[pass]; }
};

// What a lane stages: rows of 8 x 8 matrices, four of which are 16 rows of Y and two chunks.
struct Stager {
  uint32_t plain, gated;  // of a block
  bool odd;
  int source;  // the lane that has its gated outputs

  __device__ __forceinline__ Stager() {
    const uint32_t lane = lane_anew();
    plain = BlockRow<false>::place(lane % 16, lane / 16);
    gated = BlockRow<true>::place(lane % 16, lane / 16);
    odd = lane % 2;
    source = lane ^ (lane % 4 == 1 || lane % 4 == 2 ? 3 : 0);
  }

  // The sums of row blocks of W.
  template <Way way>
  __device__ __forceinline__ void stage(const TiledGemmArgs& args, const float2* sums,
                                        const uint32_t (&biases)[kPassTiles],
                                        uint32_t block) const {
    if (way == kGated) {
      stage_gated(sums, biases, block + gated);
    } else {
      stage_plain<way>(args, sums, biases, block + plain);
    }
  }

 private:
  // Two row blocks at a time, whose chunks are those of the first ones exchanged.
  template <Way way>
  __device__ __forceinline__ void stage_plain(const TiledGemmArgs& args, const float2* sums,
                                              const uint32_t (&biases)[kPassTiles],
                                              uint32_t at) const {
    uint32_t words[kPassTiles / 2][4];
    auto& all = reinterpret_cast<uint32_t (&)[2 * kPassTiles]>(words);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      if (way == kWithResidual) ptx::ldmatrix_x4(words[i], at ^ i << 5);
    outputs<way>(args, sums, [&](int i) { return unpacked(biases[i / 2]); }, all);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      ptx::stmatrix_x4(at ^ i << 5, words[i]);
  }

  // Rows of W are gates and what they multiply in turn. Of two lanes the even one takes both's
  // outputs of a row block, the other those of the next one; then all those of the first are put
  // first.
  __device__ __forceinline__ void stage_gated(const float2* sums,
                                              const uint32_t (&biases)[kPassTiles],
                                              uint32_t at) const {
    uint32_t words[kPassTiles];
#pragma unroll
    for (int j = 0; j < kPassTiles; j++) {
      const int of = j / 2 * 2;  // row blocks of the chunk; j % 2: the lower rows, or the upper
      float values[2];
#pragma unroll
      for (int next = 0; next < 2; next++) {
        const float2 more = unpacked(biases[of + next]);
        const float2 sum = sums[2 * (of + next) + j % 2];
        values[next] = silu_mul(sum.x + more.x, sum.y + more.y);
      }
      const float other = __shfl_xor_sync(0xffffffff, odd ? values[0] : values[1], 1);
      const uint32_t word = odd ? packed(other, values[1]) : packed(values[0], other);
      words[j] = __shfl_sync(0xffffffff, word, source);
    }
    ptx::stmatrix_x4(at, words);
  }
};
