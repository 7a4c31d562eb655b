// Scales of a W of 4 or 8 bits in the tiled GEMM: what the pairs of a fragment are multiplied by, in
// as few instructions as possible. 2^-kRowPower of each weight is left to the sums.
//
//   float codes:     as placed() has them; the scale makes up for 2^-kBias
//   float32 scales:  in bfloat16 two numbers, high + low, of 16 bits together
//   e4m3 scales:     times e2m1 they are exact in 16 bits; the row's factor is left to the sums
#pragma once

#include "gemm_common.cuh"
#include "units.cuh"

constexpr bool kPlaced = CODE == kE2m1 || CODE == kE4m3 && (BFLOAT16 || SCALE_BYTES == 4);
// So much that no scale below 2^39, or no e4m3, times 2^(kBias - kRowPower) is infinite.
constexpr int kRowPower = CODE == kE2m1                ? BFLOAT16 ? 8 : 7
                          : CODE == kE4m3 && BFLOAT16 ? 32
                                                      : 0;
constexpr int kScalePower = kPlaced ? kBias - kRowPower : 0;
static_assert((CODE == kE2m1) == (SCALE_BYTES == 1), "e2m1 alone has scales of one byte");

__device__ __forceinline__ constexpr float power_of_two(int power) {
  float value = 1.0f;
  for (; power > 0; power--)
    value *= 2.0f;
  return value;
}

// Of a row of an atom.
struct PairScales : RowScales {
  uint32_t high[kGroups], low[kGroups];  // pairs; of e4m3 scales, two scales are a pair

  __device__ __forceinline__ void load(const uint8_t* unit, int atom, int row) {
    RowScales::load(unit, atom, row);
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      const int step = group * GROUP / 16;
      if (SCALE_BYTES == 1) {
        if (group % 2) continue;
        uint32_t both = ptx::halves_of_e4m3(scales[0] >> 8 * group & 0xffff);
        if (BFLOAT16) {
          const __half* const of = reinterpret_cast<const __half*>(&both);
          both = packed(__half2float(of[0]), __half2float(of[1]));
        }
        high[group / 2] = ptx::mul(both, power_pair(kScalePower), Element());
      } else if (SCALE_BYTES == 2) {
        high[group] = scale_pair(step);
        if (kPlaced) high[group] = ptx::mul(high[group], power_pair(kScalePower), Element());
      } else {
        const float wide = scale(step) * power_of_two(kScalePower);
        scales[group] = __float_as_uint(wide);
        high[group] = packed(wide, wide);
        const float rest = wide - unpacked(high[group]).x;
        low[group] = packed(rest, rest);
      }
    }
  }

  // A pair times its scale, rounded once; with `low` a last bit may differ.
  __device__ __forceinline__ uint32_t multiply(uint32_t pair, int step) const {
    const int group = step * 16 / GROUP;
    if (SCALE_BYTES == 1) {
      const uint32_t both = high[group / 2];
      const uint32_t own = group % 2 ? both >> 16 | (both & 0xffff0000) : twice(both & 0xffff);
      return ptx::mul(pair, own, Element());
    }
    if (SCALE_BYTES == 2) return ptx::mul(pair, high[group], Element());
    if (BFLOAT16)
      return ptx::fma(pair, high[group], ptx::mul(pair, low[group], Element()), Element());
    return scaled(pair, *this, step);
  }

  // What the row's sums are multiplied by.
  __device__ __forceinline__ float row_factor() const {
    return power_of_two(kRowPower) * (SCALE_BYTES == 1 ? factor : 1.0f);
  }
};

// Scales the sums of two row blocks' rows.
__device__ __forceinline__ void multiply_rows(const PairScales (&scales)[2], Accumulators& acc) {
  if constexpr (kRowPower != 0) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      const float factor = scales[i % 2].row_factor();
      acc.tile[0][i].x *= factor, acc.tile[0][i].y *= factor;
    }
  }
}
