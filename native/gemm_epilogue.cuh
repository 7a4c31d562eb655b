// How SplitK_GEMM's sums become outputs: norm, bias, activation, residual.
#pragma once

#include "gemm_norm.cuh"

// The outputs of a thread, by twos: neighbouring rows of W make pairs, of which even lanes have
// those of row 2t of X, odd ones of 2t + 1. What is added to the sums is read ahead of them, but
// for residuals that there are no registers for.
struct Outputs {
  static constexpr bool kAhead = X_TILES <= 4 && !NORM;
  static constexpr int kOutputs = 2 * X_TILES;  // number 2i + j is of columns n + 8i, row block j

  const SplitKGemmArgs& args;
  const int m, n;  // of the first; others are 8 further
  const int row_blocks;
  uint32_t bias[2], residual[kAhead ? kOutputs : 1];  // pairs

  // Of the warp's two row blocks, from row `first_row` of W on, `row_blocks` exist.
  __device__ __forceinline__ Outputs(const SplitKGemmArgs& args, int first_row, int row_blocks)
      : args(args),
        m(first_row + threadIdx.x % 32 / 8 * 2),
        n(threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2),
        row_blocks(row_blocks) {
    if (args.m % 2 == 0) {
      load_ahead<true>();
    } else {
      load_ahead<false>();
    }
  }

  // Step by step for all of them, with no branch within a step: what one waits for, all wait for.
  __device__ __forceinline__ void put(const Sums& sums, const Moments& moments) const {
    float2 pairs[kOutputs];
    exchange(sums, pairs);
    Outputs(*this, ptx::anew(m), ptx::anew(n), ptx::anew(row_blocks)).put(pairs, moments);
  }

 private:
  // The same, known anew: else the compiler reckons addresses ahead, to stay in registers while
  // products go on.
  __device__ __forceinline__ Outputs(const Outputs& of, int m, int n, int row_blocks)
      : args(of.args), m(m), n(n), row_blocks(row_blocks) {
#pragma unroll
    for (int j = 0; j < 2; j++)
      bias[j] = of.bias[j];
#pragma unroll
    for (int i = 0; kAhead && i < kOutputs; i++)
      residual[i] = of.residual[i];
  }

  __device__ __forceinline__ void put(float2 (&pairs)[kOutputs], const Moments& moments) const {
    if (NORM) scale(moments, pairs);
#pragma unroll
    for (int of = 0; of < kOutputs; of++)
      pairs[of] = sum(pairs[of], bias[of % 2]);
    if (args.activation == kSiluMul) {
      put_gated(pairs);
      return;
    }
    if (args.activation == kRelu) {
#pragma unroll
      for (int of = 0; of < kOutputs; of++)
        pairs[of] = {fmaxf(pairs[of].x, 0.0f), fmaxf(pairs[of].y, 0.0f)};
    }
    if (args.residual) add_residual(pairs);
    if (args.m % 2 == 0) {
      put_pairs<true>(pairs);
    } else {
      put_pairs<false>(pairs);
    }
  }

  __device__ __forceinline__ int row(int of) const { return m + kRowsPerBlock * (of % 2); }
  __device__ __forceinline__ int column(int of) const { return n + 8 * (of / 2); }
  __device__ __forceinline__ bool exists(int of) const {
    return of % 2 < row_blocks && row(of) < args.m && column(of) < args.n;
  }
  // In a matrix like X, with rows of `width`.
  __device__ __forceinline__ int64_t offset(int of, int width) const {
    return static_cast<int64_t>(column(of)) * width;
  }
  __device__ __forceinline__ static float2 sum(float2 pair, uint32_t more) {
    return {pair.x + unpacked(more).x, pair.y + unpacked(more).y};
  }

  __device__ __forceinline__ static void exchange(const Sums& sums, float2 (&pairs)[kOutputs]) {
    const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int of = 0; of < kOutputs; of++) {
      const float2 own = sums.total(of);
      const float other = __shfl_xor_sync(0xffffffff, odd ? own.x : own.y, 4);
      pairs[of] = odd ? float2{other, own.y} : float2{own.x, other};
    }
  }
  __device__ __forceinline__ void scale(const Moments& moments, float2 (&pairs)[kOutputs]) const {
#pragma unroll
    for (int of = 0; of < kOutputs; of += 2) {
      const float by = moments.scale(args, column(of));
#pragma unroll
      for (int j = of; j < of + 2; j++)
        pairs[j].x *= by, pairs[j].y *= by;
    }
  }
  // What was not read ahead is read by twos: for more there are no registers.
  __device__ __forceinline__ void add_residual(float2 (&pairs)[kOutputs]) const {
#pragma unroll
    for (int of = 0; of < kOutputs; of += 2) {
      uint32_t more[2] = {};
      if (kAhead) {
        more[0] = residual[of], more[1] = residual[of + 1];
      } else if (args.m % 2) {
        load_residual<false>(more, ptx::anew(of));
      } else {
        load_residual<true>(more, ptx::anew(of));
      }
      pairs[of] = sum(pairs[of], more[0]), pairs[of + 1] = sum(pairs[of + 1], more[1]);
    }
  }

  // Of even rows of W, which are gates, and the odd ones, what they multiply: silu(gate) * up.
  __device__ __forceinline__ void put_gated(const float2 (&pairs)[kOutputs]) const {
    float products[kOutputs];
#pragma unroll
    for (int of = 0; of < kOutputs; of++)
      products[of] = silu_mul(pairs[of].x, pairs[of].y);
#pragma unroll
    for (int of = 0; of < kOutputs; of++) {
      if (exists(of)) convert(args.y[offset(of, args.m / 2) + row(of) / 2], products[of]);
    }
  }
  template <bool aligned>
  __device__ __forceinline__ void put_pairs(const float2 (&pairs)[kOutputs]) const {
#pragma unroll
    for (int of = 0; of < kOutputs; of++) {
      Element* const y = args.y + offset(of, args.m) + row(of);
      if (aligned) {
        if (exists(of)) *reinterpret_cast<uint32_t*>(y) = packed(pairs[of].x, pairs[of].y);
      } else {
        if (exists(of)) convert(y[0], pairs[of].x);
        if (exists(of) && row(of) + 1 < args.m) convert(y[1], pairs[of].y);
      }
    }
  }

  // One after the other, with no branch between them: none waits for another.
  template <bool aligned>
  __device__ __forceinline__ void load_ahead() {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      bias[j] = 0;
      if (args.bias && j < row_blocks && row(j) < args.m) bias[j] = load<aligned>(args.bias, j);
    }
    if (kAhead && args.residual) load_residual<aligned>(residual);
  }
  template <bool aligned, int pairs>
  __device__ __forceinline__ void load_residual(uint32_t (&to)[pairs], int first = 0) const {
#pragma unroll
    for (int i = 0; i < pairs; i++) {
      const int of = first + i;
      if (exists(of)) to[i] = load<aligned>(args.residual + offset(of, args.m), of);
    }
  }
  template <bool aligned>
  __device__ __forceinline__ uint32_t load(const Element* from, int of) const {
    from += row(of);
    if (aligned) return *reinterpret_cast<const uint32_t*>(from);
    return load_unaligned(from, row(of) + 1 < args.m);
  }
};
