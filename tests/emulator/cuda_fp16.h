// CUDA C++ for a host compiler, as far as the kernels use it: qualifiers, vectors, 16-bit floats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) alignas(n)
#define __grid_constant__
#define __launch_bounds__(...)
#define ALWAYS_INLINE __attribute__((always_inline)) inline  // into functions of other checks too
#define __CUDA_ARCH__ 900

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  uint32_t x;
};

// Round a float to the nearest float with `mantissa` bits, ties to even. `min_exponent` is the
// exponent of the smallest normal number, 2^max_exponent overflows to infinity.
inline float nearest(float value, int mantissa, int min_exponent, int max_exponent) {
  if (!std::isfinite(value) || value == 0) return value;
  int exponent;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent - 1, min_exponent) - mantissa;
  const float rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  return std::fabs(rounded) >= std::ldexp(1.0f, max_exponent) ? std::copysign(INFINITY, value)
                                                              : rounded;
}

ALWAYS_INLINE uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
ALWAYS_INLINE float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct __half {
  uint16_t bits;
};

ALWAYS_INLINE float __half2float(__half half) {
  // As a float's, its exponent is too small by 112, but for those of infinities and NaN.
  const uint32_t size = (half.bits & 0x7fffu) << 13;
  const float value = __uint_as_float(size) * 0x1p112f;
  const uint32_t bits = size < 31u << 23 ? __float_as_uint(value) : size | 0xffu << 23;
  return __uint_as_float(bits | (half.bits & 0x8000u) << 16);
}

inline __half __ushort_as_half(uint16_t bits) {
  return {bits};
}

inline __half __float2half_rn(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return {0x7fff};
  const float size = std::fabs(nearest(value, 10, -14, 16));
  if (std::isinf(size)) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (size < std::ldexp(1.0f, -14)) {
    return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(size, 24)))};
  }
  int exponent;
  const float fraction = std::frexp(size, &exponent);  // from a half up to one
  const auto digits = static_cast<uint16_t>(std::ldexp(fraction, 11)) & 1023;
  return {static_cast<uint16_t>(sign | (exponent + 14) << 10 | digits)};
}

struct __nv_bfloat16 {
  uint16_t bits;
};

ALWAYS_INLINE float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float __expf(float x) {
  return std::exp(x);
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
using std::fmaxf;
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
