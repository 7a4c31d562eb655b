// How the sums of wide tiles become outputs: bias, activation, residual. A thread has sums of two
// rows of X, and two rows of each octet of W.
#pragma once

#include "tiled_staging.cuh"

// The outputs of a warpgroup's rows of W and of X.
struct TileOutputs {
  const TiledGemmArgs& args;
  const Staging& staging;
  const int octet, octets;  // of W: the first one, and how many there are
  const int n;              // the first row of Y
  uint32_t bias[X_TILES];   // of rows 2t and 2t + 1 of each octet, read ahead of the sums

  __device__ __forceinline__ TileOutputs(const TiledGemmArgs& args, const Staging& staging,
                                         int octet, int octets, int n)
      : args(args), staging(staging), octet(octet), octets(octets), n(n) {
    load_bias(bias, 0);
  }

  __device__ __forceinline__ void put(const Sums& sums) const {
    constexpr int kLast = X_TILES % kRowChunks;
#pragma unroll
    for (int tile = 0; tile + kRowChunks <= X_TILES; tile += kRowChunks)
      put_tiles<kRowChunks>(sums.tile[0] + 2 * tile, bias + tile, tile);
    constexpr int kWhole = X_TILES - kLast;
    if (kLast) put_tiles<kLast>(sums.tile[0] + 2 * kWhole, bias + kWhole, kWhole);
  }

  // Of octets of W, from the warpgroup's `tile` on.
  template <int tiles>
  __device__ __forceinline__ void put_tiles(const float2* sums, int tile) const {
    uint32_t biases[tiles];
    load_bias(biases, tile);
    put_tiles<tiles>(sums, biases, tile);
  }

 private:
  // One after the other, with no branch between them: none waits for another.
  template <int tiles>
  __device__ __forceinline__ void load_bias(uint32_t (&to)[tiles], int tile) const {
    const int first = (octet + tile) * kOctetRows + threadIdx.x % 4 * 2;
    const int rows = args.bias ? args.m - first : 0;
#pragma unroll
    for (int i = 0; i < tiles; i++) {
      to[i] = 0;
      if (i * kOctetRows + 1 < rows) {
        to[i] = *reinterpret_cast<const uint32_t*>(args.bias + first + i * kOctetRows);
      }
    }
    if (rows % 2 == 0) return;
#pragma unroll
    for (int i = 0; i < tiles; i++)
      if (i * kOctetRows + 1 == rows) to[i] = load_unaligned(args.bias + args.m - 1, false);
  }

  template <int tiles>
  __device__ __forceinline__ void put_tiles(const float2* sums, const uint32_t* biases,
                                            int tile) const {
    const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x) % kWarpgroup;
    const int row = (octet + tile) * kOctetRows, chunks = tiles / gates(args);
    const OutputBlock block = {n, min(kXRows, args.n - n), row / gates(args),
                               min((octets - tile) * kOctetRows, args.m - row) / gates(args)};
    if (block.rows <= 0 || block.columns <= 0) return;
    if (args.activation == kSiluMul) {
      stage_gated<tiles>(sums, biases, thread);
    } else {
      if (args.residual) {
        staging.move<false>(args, block, chunks, thread);
        staging.sync();
      }
      stage<tiles>(sums, biases, thread);
    }
    staging.sync();
    staging.move<true>(args, block, chunks, thread);
    staging.sync();
  }

  // Where a lane's row of four 8 x 8 matrices is: 16 rows of Y, and two chunks from `number` on.
  __device__ __forceinline__ uint32_t matrices(int number, uint32_t thread) const {
    const uint32_t lane = thread % 32;
    return staging.chunk(thread / 32 * 16 + lane % 16, number + lane / 16);
  }

  template <int tiles>
  __device__ __forceinline__ void stage(const float2* sums, const uint32_t* biases,
                                        uint32_t thread) const {
#pragma unroll
    for (int i = 0; i < tiles; i += 2) {
      const uint32_t at = matrices(i, thread);
      uint32_t words[4];
      if (args.residual) ptx::ldmatrix_x4(words, at);
#pragma unroll
      for (int j = 0; j < 4; j++)
        words[j] = output(args, sums[2 * i + j], unpacked(biases[i + j / 2]), words[j]);
      ptx::stmatrix_x4(at, words);
    }
  }

  // Rows of W are gates and what they multiply in turn. Of two lanes the even one takes both's
  // outputs of an octet, the other those of the next one: they share a chunk, by twos in turn.
  template <int tiles>
  __device__ __forceinline__ void stage_gated(const float2* sums, const uint32_t* biases,
                                              uint32_t thread) const {
    const bool odd = thread % 2;
#pragma unroll
    for (int i = 0; i < tiles; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int of = i + j / 2 * 2;  // octets of the chunk; j % 2: the lower rows, or the upper
        float values[2];
#pragma unroll
        for (int next = 0; next < 2; next++) {
          const float2 more = unpacked(biases[of + next]);
          const float2 sum = sums[2 * (of + next) + j % 2];
          values[next] = silu_mul(sum.x + more.x, sum.y + more.y);
        }
        const float other = __shfl_xor_sync(0xffffffff, odd ? values[0] : values[1], 1);
        words[j] = odd ? packed(other, values[1]) : packed(values[0], other);
      }
      ptx::stmatrix_x4(matrices(i / 2, thread), words);
    }
  }
};
