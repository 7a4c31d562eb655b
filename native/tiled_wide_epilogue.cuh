// From accumulators to blocks of outputs in shared memory, for variants whose warpgroups multiply
// 64 rows of X (WIDE; tiled_epilogue.cuh has the others). A thread's accumulators belong to two
// rows of X and, in each row block, two rows of W, whose outputs are neighbours in Y.
#pragma once

#include "tiled_staging.cuh"

// The biases of lane 4g + t: rows 2t and 2t + 1 of each row block of some passes.
template <int passes>
struct Biases {
  uint32_t of[passes][kPassTiles];

  // Loads follow each other with no branch between them, so that none waits for another.
  __device__ __forceinline__ Biases(const TiledGemmArgs& args, const WarpgroupTile& tile,
                                    int first) {
    const int row_block = tile.row_block + first * kPassTiles;
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
    // If M is odd, the last row of W has no neighbour.
    if (rows % 2 == 0) return;
#pragma unroll
    for (int i = 0; i < passes * kPassTiles; i++) {
      if (i * kRowsPerBlock + 1 != rows) continue;
      of[i / kPassTiles][i % kPassTiles] = load_unaligned(args.bias + args.m - 1, false);
    }
  }
  __device__ __forceinline__ const uint32_t (&in(int pass) const)[kPassTiles] { return of[pass]; }
};

// Writes a lane's outputs of a pass to a block, as rows of 8 x 8 matrices. Four matrices are
// written at a time: 16 rows of Y by two chunks.
struct Stager {
  uint32_t plain, gated;  // offsets in a block
  bool odd;
  int source;  // the lane that computes the gated outputs that this lane writes

  __device__ __forceinline__ Stager() {
    const uint32_t lane = opaque_lane();
    plain = BlockRow<false>::offset(lane % 16, lane / 16);
    gated = BlockRow<true>::offset(lane % 16, lane / 16);
    odd = lane % 2;
    source = lane ^ (lane % 4 == 1 || lane % 4 == 2 ? 3 : 0);
  }

  // `acc` are a pass's accumulators: kPassTiles row blocks of W.
  template <EpilogueKind kind>
  __device__ __forceinline__ void stage(const TiledGemmArgs& args, const float2* acc,
                                        const uint32_t (&biases)[kPassTiles],
                                        uint32_t block) const {
    if (kind == kGated) {
      stage_gated(acc, biases, block + gated);
    } else {
      stage_plain<kind>(args, acc, biases, block + plain);
    }
  }

 private:
  // Two row blocks at a time; an XOR of the address reaches the swizzled chunks of the next two.
  template <EpilogueKind kind>
  __device__ __forceinline__ void stage_plain(const TiledGemmArgs& args, const float2* acc,
                                              const uint32_t (&biases)[kPassTiles],
                                              uint32_t at) const {
    uint32_t words[kPassTiles / 2][4];
    auto& all = reinterpret_cast<uint32_t (&)[2 * kPassTiles]>(words);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      if (kind == kWithResidual) ptx::ldmatrix_x4(words[i], at ^ i << 5);
    apply_epilogue<kind>(args, acc, [&](int i) { return unpacked(biases[i / 2]); }, all);
#pragma unroll
    for (int i = 0; i < kPassTiles / 2; i++)
      ptx::stmatrix_x4(at ^ i << 5, words[i]);
  }

  // silu(gate) * up, a gate and its up being the two values of an accumulator pair. Of two lanes
  // the even one takes both's outputs of a row block, the odd one those of the next row block. Then
  // the outputs of the first row block are moved to the first lanes.
  __device__ __forceinline__ void stage_gated(const float2* acc,
                                              const uint32_t (&biases)[kPassTiles],
                                              uint32_t at) const {
    uint32_t words[kPassTiles];
#pragma unroll
    for (int j = 0; j < kPassTiles; j++) {
      const int of = j / 2 * 2;  // the two row blocks; j % 2: rows g or g + 8 of X
      float values[2];
#pragma unroll
      for (int next = 0; next < 2; next++) {
        const float2 more = unpacked(biases[of + next]);
        const float2 sum = acc[2 * (of + next) + j % 2];
        values[next] = silu_mul(sum.x + more.x, sum.y + more.y);
      }
      const float other = __shfl_xor_sync(0xffffffff, odd ? values[0] : values[1], 1);
      const uint32_t word = odd ? packed(other, values[1]) : packed(values[0], other);
      words[j] = __shfl_sync(0xffffffff, word, source);
    }
    ptx::stmatrix_x4(at, words);
  }
};
