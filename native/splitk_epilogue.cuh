// The epilogue of SplitK_GEMM: Y = activation(scale * accumulators + bias) + residual. With units
// also the first half of the RMSNorm behind Y: Y * weight, and sums of squares of each row block.
#pragma once

#include "splitk_norm.cuh"

// The outputs of a thread, lane 4g + t. Lanes exchange accumulators, so that a pair is two
// neighbouring rows of W, which are neighbours in Y: lanes of even g have those of row 2t of X,
// lanes of odd g those of row 2t + 1. Bias and residual are loaded before the products where
// registers allow, to hide their latency.
struct Epilogue {
  static constexpr bool kEarlyResidual = TILES <= 4 && !NORM;
  static constexpr bool kEarlyWeight = kHasUnits && !(kMixes && TILES > 1);  // of the norm behind Y
  static constexpr int kPairsOfThread = 2 * TILES;  // pair 2i + j: row n + 8i of Y, row block j

  const SplitKGemmArgs& args;
  const int m, n;  // of the first pair: row of W, row of X
  const int row_blocks;
  uint32_t bias[2], residual[kEarlyResidual ? kPairsOfThread : 1];
  uint32_t next_weight[2];  // with kEarlyWeight

  // For the warp's two row blocks, from row `first_row` of W on, of which `row_blocks` exist.
  __device__ __forceinline__ Epilogue(const SplitKGemmArgs& args, int first_row, int row_blocks)
      : args(args),
        m(first_row + threadIdx.x % 32 / 8 * 2),
        n(threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2),
        row_blocks(row_blocks) {
    if (kHasUnits) {  // else registers would be kept for the group before
#pragma unroll
      for (uint32_t& pair : residual)
        pair = 0;
      next_weight[0] = next_weight[1] = 0;
    }
    if (args.m % 2 == 0) {
      load_early<true>();
    } else {
      load_early<false>();
    }
  }

  // Each step for all pairs at once, with no branch within a step, so that the latencies of loads
  // overlap.
  __device__ __forceinline__ void store(const Accumulators& acc, const Moments& moments) const {
    float2 pairs[kPairsOfThread];
    exchange(acc, pairs);
    Epilogue(*this, ptx::opaque(m), ptx::opaque(n), ptx::opaque(row_blocks)).store(pairs, moments);
  }

 private:
  // A copy whose addresses the compiler has to compute anew: else it computes them before the
  // products and keeps them in registers meanwhile.
  __device__ __forceinline__ Epilogue(const Epilogue& of, int m, int n, int row_blocks)
      : args(of.args), m(m), n(n), row_blocks(row_blocks) {
#pragma unroll
    for (int j = 0; j < 2; j++)
      bias[j] = of.bias[j];
#pragma unroll
    for (int j = 0; kEarlyWeight && j < 2; j++)
      next_weight[j] = of.next_weight[j];
#pragma unroll
    for (int i = 0; kEarlyResidual && i < kPairsOfThread; i++)
      residual[i] = of.residual[i];
  }

  __device__ __forceinline__ void store(float2 (&pairs)[kPairsOfThread],
                                        const Moments& moments) const {
    if (NORM || kHasUnits && args.x_squares) scale(moments, pairs);
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++)
      pairs[i] = add(pairs[i], bias[i % 2]);
    if (args.activation == kSiluMul) {
      store_gated(pairs);
      return;
    }
    if (args.activation == kRelu) {
#pragma unroll
      for (int i = 0; i < kPairsOfThread; i++)
        pairs[i] = relu(pairs[i]);
    }
    if (args.residual) add_residual(pairs);
    if (args.m % 2 == 0) {
      store_pairs<true>(pairs);
    } else {
      store_pairs<false>(pairs);
    }
    if (kHasUnits && args.scaled) store_scaled(pairs);
  }

  __device__ __forceinline__ int w_row(int pair) const { return m + kRowsPerBlock * (pair % 2); }
  __device__ __forceinline__ int x_row(int pair) const { return n + 8 * (pair / 2); }
  __device__ __forceinline__ bool exists(int pair) const {
    return pair % 2 < row_blocks && w_row(pair) < args.m && x_row(pair) < args.n;
  }
  // Where the pair's row begins in Y or the residual, whose rows are `width` long.
  __device__ __forceinline__ int64_t offset(int pair, int width) const {
    return static_cast<int64_t>(x_row(pair)) * width;
  }
  __device__ __forceinline__ static float2 add(float2 pair, uint32_t more) {
    return {pair.x + unpacked(more).x, pair.y + unpacked(more).y};
  }

  __device__ __forceinline__ void scale(const Moments& moments,
                                        float2 (&pairs)[kPairsOfThread]) const {
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i += 2) {
      const float by = moments.scale(args, x_row(i));
#pragma unroll
      for (int j = i; j < i + 2; j++)
        pairs[j].x *= by, pairs[j].y *= by;
    }
  }
  // A residual that was not loaded before is loaded for two pairs at a time, to save registers.
  __device__ __forceinline__ void add_residual(float2 (&pairs)[kPairsOfThread]) const {
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i += 2) {
      uint32_t more[2] = {};
      if (kEarlyResidual) {
        more[0] = residual[i], more[1] = residual[i + 1];
      } else if (args.m % 2) {
        load_residual<false>(more, ptx::opaque(i));
      } else {
        load_residual<true>(more, ptx::opaque(i));
      }
      pairs[i] = add(pairs[i], more[0]), pairs[i + 1] = add(pairs[i + 1], more[1]);
    }
  }

  // silu(gate) * up: even rows of W are gates, odd rows ups.
  __device__ __forceinline__ void store_gated(const float2 (&pairs)[kPairsOfThread]) const {
    float products[kPairsOfThread];
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++)
      products[i] = silu_mul(pairs[i].x, pairs[i].y);
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++) {
      if (exists(i)) convert(args.y[offset(i, args.m / 2) + w_row(i) / 2], products[i]);
    }
  }
  // The first half of the norm behind Y, from the rounded Y. The four lanes 4g + t of one t, with
  // all g even or all g odd, have the four pairs of a row of Y in a row block.
  __device__ __forceinline__ void store_scaled(float2 (&pairs)[kPairsOfThread]) const {
    const int stride = squares_stride((args.m + kRowsPerBlock - 1) / kRowsPerBlock);
    uint32_t weights[2] = {next_weight[0], next_weight[1]};
    if (!kEarlyWeight) load_weight<false>(weights);
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++) {
      float2 y = unpacked(packed(pairs[i].x, pairs[i].y));
      if (w_row(i) >= args.m) y.x = 0.0f;
      if (w_row(i) + 1 >= args.m) y.y = 0.0f;
      float sum = fmaf(y.y, y.y, y.x * y.x);
      sum += __shfl_xor_sync(0xffffffff, sum, 8);
      sum += __shfl_xor_sync(0xffffffff, sum, 16);
      if (exists(i) && w_row(i) % kRowsPerBlock == 0)
        args.squares[x_row(i) * stride + w_row(i) / kRowsPerBlock] = sum;
      const float2 weight = unpacked(weights[i % 2]);
      pairs[i] = {y.x * (weight.x * args.next_factor), y.y * (weight.y * args.next_factor)};
    }
    if (args.m % 2 == 0) {
      store_pairs<true, true>(pairs);
    } else {
      store_pairs<false, true>(pairs);
    }
  }
  // `aligned`: both elements of a pair are written at once.
  template <bool aligned, bool scaled = false>
  __device__ __forceinline__ void store_pairs(const float2 (&pairs)[kPairsOfThread]) const {
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++) {
      Element* const y = (scaled ? args.scaled : args.y) + offset(i, args.m) + w_row(i);
      if (aligned) {
        if (exists(i)) *reinterpret_cast<uint32_t*>(y) = packed(pairs[i].x, pairs[i].y);
      } else {
        if (exists(i)) convert(y[0], pairs[i].x);
        if (exists(i) && w_row(i) + 1 < args.m) convert(y[1], pairs[i].y);
      }
    }
  }

  // Loads follow each other with no branch between them, so that none waits for another.
  template <bool aligned>
  __device__ __forceinline__ void load_early() {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      bias[j] = 0;
      if (args.bias && j < row_blocks && w_row(j) < args.m) bias[j] = load<aligned>(args.bias, j);
    }
    if (kEarlyWeight && args.next_weight) load_weight<aligned>(next_weight);
    if (kEarlyResidual && args.residual) load_residual<aligned>(residual);
  }
  template <bool aligned>
  __device__ __forceinline__ void load_weight(uint32_t (&to)[2]) const {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      to[j] = 0;
      if (j < row_blocks && w_row(j) < args.m) to[j] = load<aligned>(args.next_weight, j);
    }
  }
  template <bool aligned, int pairs>
  __device__ __forceinline__ void load_residual(uint32_t (&to)[pairs], int first = 0) const {
#pragma unroll
    for (int i = 0; i < pairs; i++) {
      const int pair = first + i;
      if (exists(pair)) to[i] = load<aligned>(args.residual + offset(pair, args.m), pair);
    }
  }
  template <bool aligned>
  __device__ __forceinline__ uint32_t load(const Element* from, int pair) const {
    from += w_row(pair);
    if (aligned) return *reinterpret_cast<const uint32_t*>(from);
    return load_unaligned(from, w_row(pair) + 1 < args.m);
  }
};
