// How SplitK_GEMM's sums become outputs: norm, bias, activation, residual.
#pragma once

#include "gemm_norm.cuh"

// Stores two outputs of row `n` of X, those of rows `m` and m + 1 of W. With kSiluMul even rows of
// W are gates and the odd ones what they multiply: silu(gate) * up.
__device__ __forceinline__ void store(const SplitKGemmArgs& args, int m, int n, float2 sums,
                                      uint32_t bias, uint32_t residual) {
  if (args.bias) sums.x += unpacked(bias).x, sums.y += unpacked(bias).y;
  if (args.activation == kSiluMul) {
    convert(args.y[static_cast<int64_t>(n) * (args.m / 2) + m / 2], silu_mul(sums.x, sums.y));
    return;
  }
  if (args.activation == kRelu) sums.x = fmaxf(sums.x, 0.0f), sums.y = fmaxf(sums.y, 0.0f);
  if (args.residual) sums.x += unpacked(residual).x, sums.y += unpacked(residual).y;
  Element* const y = args.y + static_cast<int64_t>(n) * args.m + m;
  if (args.m % 2 == 0) {
    *reinterpret_cast<uint32_t*>(y) = packed(sums.x, sums.y);
  } else {
    convert(y[0], sums.x);
    if (m + 1 < args.m) convert(y[1], sums.y);
  }
}

// The outputs of a thread, by twos: neighbouring rows of W make pairs, of which even lanes have
// those of row 2t of X, odd ones of 2t + 1. What is added to the sums is read ahead of them, but
// for residuals that there are no registers for.
struct Outputs {
  static constexpr bool kAhead = X_TILES <= 4 && !NORM;

  const SplitKGemmArgs& args;
  const int m, n;  // of the first; others are 8 further
  const int octets;
  uint32_t bias[2], residual[kAhead ? 2 * X_TILES : 1];  // pairs

  // Of the warp's two octets, from row `first_row` of W on, `octets` exist.
  __device__ __forceinline__ Outputs(const SplitKGemmArgs& args, int first_row, int octets)
      : args(args),
        m(first_row + threadIdx.x % 32 / 8 * 2),
        n(threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2),
        octets(octets) {
    if (args.m % 2 == 0) {
      load_ahead<true>();
    } else {
      load_ahead<false>();
    }
  }

  __device__ __forceinline__ void put(const Sums& sums, const Moments& moments) const {
    const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (j >= octets) break;
#pragma unroll
      for (int i = 0; i < X_TILES; i++) {
        const float2 own = sums.total(2 * i + j);
        const float other = __shfl_xor_sync(0xffffffff, odd ? own.x : own.y, 4);
        if (row(j) >= args.m || column(i) >= args.n) continue;
        uint32_t more;
        if (kAhead) {
          more = residual[2 * i + j];
        } else if (args.residual) {
          more = args.m % 2 ? load<false>(args.residual + offset(i), j)
                            : load<true>(args.residual + offset(i), j);
        }
        float2 pair = odd ? float2{other, own.y} : float2{own.x, other};
        if (NORM) {
          const float scale = moments.scale(args, column(i));
          pair.x *= scale, pair.y *= scale;
        }
        store(args, row(j), column(i), pair, bias[j], more);
      }
    }
  }

 private:
  __device__ __forceinline__ int row(int j) const { return m + kOctetRows * j; }
  __device__ __forceinline__ int column(int i) const { return n + 8 * i; }
  __device__ __forceinline__ int64_t offset(int i) const {
    return static_cast<int64_t>(column(i)) * args.m;
  }
  // One after the other, with no branch between them: none waits for another.
  template <bool aligned>
  __device__ __forceinline__ void load_ahead() {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bool exists = j < octets && row(j) < args.m;
      if (exists && args.bias) bias[j] = load<aligned>(args.bias, j);
#pragma unroll
      for (int i = 0; kAhead && i < X_TILES; i++) {
        if (exists && args.residual && column(i) < args.n)
          residual[2 * i + j] = load<aligned>(args.residual + offset(i), j);
      }
    }
  }
  template <bool aligned>
  __device__ __forceinline__ uint32_t load(const Element* from, int j) const {
    from += row(j);
    if (aligned) return *reinterpret_cast<const uint32_t*>(from);
    return load_unaligned(from, row(j) + 1 < args.m);
  }
};
