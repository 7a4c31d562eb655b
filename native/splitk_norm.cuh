// RMSNorm and LayerNorm of X inside SplitK_GEMM, with -DNORM=1: accumulators of X W^T are scaled by
// 1 / sqrt(mean of squares + eps), or 1 / sqrt(variance + eps), of their row of X. The norm's
// weight, bias and mean are folded into W and the bias before.
//
// All of X passes through shared memory for a CTA's first group. The first warpgroup then adds up
// its rows and their squares, in an order that depends on K alone.
//
// The weight g of an RMSNorm cannot be folded into a W of 4 or 8 bits. The product ahead of the
// norm writes y * g * 2^-k beside y, and the sum of y^2 of each row block (splitk_epilogue.cuh).
// The product behind the norm takes y * g * 2^-k as its X and adds up these sums.
#pragma once

#include "splitk_gemm.cuh"

#if CODE
#include "cta_reduce.cuh"

// The factors for the accumulators of X's rows, in shared memory.
struct Moments {
  float factors[kXRows];

  __device__ __forceinline__ float scale(const SplitKGemmArgs&, int row) const {
    return factors[row];
  }
  // Called by all consumers after griddepcontrol.wait, while X's first stage is on its way. A warp
  // adds up the sums of whole rows, in an order that depends on K alone.
  __device__ __forceinline__ void add_up(const SplitKGemmArgs& args, int warp) {
    const int lane = threadIdx.x % 32, all = squares_stride(args.x_row_blocks) / 4;
#pragma unroll 1
    for (int row = warp; row < args.n; row += kConsumers / 32) {
      const float4* const from = reinterpret_cast<const float4*>(args.x_squares) + row * all;
      float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
      for (int i = lane; i < all; i += 32) {
        const float4 more = from[i];
        sums.x += more.x, sums.y += more.y, sums.z += more.z, sums.w += more.w;
      }
      const float sum = reduce_warp((sums.x + sums.y) + (sums.z + sums.w),
                                    [](float a, float b) { return a + b; });
      if (lane == 0) factors[row] = rsqrtf(sum * args.inverse_k + args.eps) * args.x_factor;
    }
  }
};

#else

// Sums and sums of squares of X's rows, in shared memory. `kShares` warps add up each row block,
// taking its atoms round-robin.
struct Moments {
  static constexpr int kShares = TILES < 4 ? 4 / TILES : 1;

  float sums[kShares][kXRows], squares[kShares][kXRows];

  // The factor for the accumulators of a row of X.
  __device__ __forceinline__ float scale(const SplitKGemmArgs& args, int row) const {
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int share = 0; share < kShares; share++)
      sum += sums[share][row], square += squares[share][row];
    const float mean = args.norm == kLayerNorm ? sum * args.inverse_k : 0.0f;
    return rsqrtf(fmaxf(square * args.inverse_k - mean * mean, 0.0f) + args.eps);
  }
};

// One warp's part: one share of a row block, or two row blocks. mma multiplies a row block, with
// rows of ones below it, by its transpose: the squares are on the diagonal, the sums below.
// Products go round-robin to `kParts` accumulators, so that none waits for the one before it.
struct MomentAccumulators {
  static constexpr int kRowBlocks = (TILES + 3) / 4, kShares = Moments::kShares;
  static constexpr int kParts = TILES < 4 ? 2 : 4;  // more would take registers from the GEMM

  const int row_block, share;
  float2 squares[kRowBlocks][kParts] = {}, sums[kRowBlocks][kParts] = {};

  __device__ __forceinline__ MomentAccumulators(int warp)
      : row_block(warp % TILES * kRowBlocks), share(warp / TILES) {}

  // Adds a stage with `atoms` of X from shared address `x` on, whose first atom is number `number`
  // along K.
  __device__ __forceinline__ void add(uint32_t x, int number, int atoms) {
    constexpr uint32_t kOnes = BFLOAT16 ? 0x3f803f80 : 0x3c003c00;
    const int lane = threadIdx.x % 32, row = lane % 8;
    const int first = (share - number) & (kShares - 1);
    x += first * kXAtomBytes + row_block * 8 * 128 + row * 128 + ((lane / 8 ^ row) << 4);
#pragma unroll 1
    for (int i = first; i < atoms; i += kShares, x += kShares * kXAtomBytes) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < kRowBlocks; j++) {
          uint32_t b[4];
          ptx::ldmatrix_x4(b, (x ^ 64 * half) + j * 8 * 128);
#pragma unroll
          for (int pair = 0; pair < 2; pair++) {
            const int part = (2 * half + pair) % kParts;
            const uint32_t b0 = b[2 * pair], b1 = b[2 * pair + 1], a[4] = {b0, kOnes, b1, kOnes};
            ptx::mma(squares[j][part], sums[j][part], a, b0, b1, Element());
          }
        }
      }
    }
  }

  // Row g's moments are with lane 4g + g / 2.
  __device__ __forceinline__ void store(Moments& to) const {
    const int lane = threadIdx.x % 32, row = lane / 4;
    if (lane % 4 != row / 2) return;
#pragma unroll
    for (int j = 0; j < kRowBlocks; j++) {
      const int n = 8 * (row_block + j) + row;
      float sum = 0.0f, square = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        sum += row % 2 ? sums[j][part].y : sums[j][part].x;
        square += row % 2 ? squares[j][part].y : squares[j][part].x;
      }
      to.sums[share][n] = sum, to.squares[share][n] = square;
    }
  }
};
#endif
