// How SplitK_GEMM's sums become outputs: norm, bias, activation, residual.
#pragma once

#include "gemm_norm.cuh"

// Two neighbouring elements, at once where their address allows it, or else each by itself, the
// second one where it exists.
__device__ __forceinline__ Pair load_pair(const Element* from, bool both, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pair*>(from);
  Pair pair = {from[0], from[0]};
  if (both) pair.second = from[1];
  return pair;
}

// Stores two outputs of row `n` of X, those of rows `m` and m + 1 of W. With kSiluMul even rows of
// W are gates and the odd ones what they multiply: silu(gate) * up.
__device__ __forceinline__ void store(const SplitKGemmArgs& args, int m, int n, float2 sums,
                                      Pair bias, Pair residual) {
  if (args.bias) sums.x += to_float(bias.first), sums.y += to_float(bias.second);
  if (args.activation == kSiluMul) {
    convert(args.y[static_cast<int64_t>(n) * (args.m / 2) + m / 2], silu_mul(sums.x, sums.y));
    return;
  }
  if (args.activation == kRelu) sums.x = fmaxf(sums.x, 0.0f), sums.y = fmaxf(sums.y, 0.0f);
  if (args.residual) sums.x += to_float(residual.first), sums.y += to_float(residual.second);
  Element* const y = args.y + static_cast<int64_t>(n) * args.m + m;
  Pair pair;
  convert(pair.first, sums.x), convert(pair.second, sums.y);
  if (args.m % 2 == 0) {
    *reinterpret_cast<Pair*>(y) = pair;
  } else {
    y[0] = pair.first;
    if (m + 1 < args.m) y[1] = pair.second;
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
  Pair bias[2], residual[kAhead ? 2 * X_TILES : 1];

  // Of the warp's two octets, from row `first_row` of W on, `octets` exist.
  __device__ __forceinline__ Outputs(const SplitKGemmArgs& args, int first_row, int octets)
      : args(args),
        m(first_row + threadIdx.x % 32 / 8 * 2),
        n(threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2),
        octets(octets) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (j >= octets || row(j) >= args.m) continue;
      if (args.bias) bias[j] = load(args.bias, j);
      if (!kAhead || args.residual == nullptr) continue;
#pragma unroll
      for (int i = 0; i < X_TILES; i++) {
        if (column(i) < args.n) residual[2 * i + j] = load(args.residual + offset(i), j);
      }
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
        Pair more;
        if (kAhead) {
          more = residual[2 * i + j];
        } else if (args.residual) {
          more = load(args.residual + offset(i), j);
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
  __device__ __forceinline__ Pair load(const Element* from, int j) const {
    return load_pair(from + row(j), row(j) + 1 < args.m, args.m % 2 == 0);
  }
};
