// native/ptx_tensor.cuh for a host compiler. The last lane of a warp to arrive computes for all.
#pragma once

#include "cuda_bf16.h"
#include "cuda_words.cuh"

namespace ptx {

// ldmatrix: each lane's elements of four 8x8 matrices, whose row addresses the lanes give.
inline void load_matrices(uint32_t (&fragment)[4], uint32_t address, bool transposed) {
  struct Taken {
    uint16_t elements[4][2];
  };
  const Taken taken = emulator::together<uint32_t, Taken>(
      address, [transposed](const uint32_t* const* given, Taken* const* lanes) UNSEEN {
        for (int number = 0; number < emulator::kWarp; number++) {
          const int matrix = number / 8, row = number % 8;
          const uint32_t from = *given[number];
          if (from % 16) emulator::fail("a row of a matrix is not aligned to 16 bytes");
          uint16_t elements[8];
          std::memcpy(elements, emulator::at(from, sizeof elements), sizeof elements);
          for (int col = 0; col < 8; col++) {
            const int first = transposed ? col : row, second = transposed ? row : col;
            lanes[4 * first + second / 2]->elements[matrix][second % 2] = elements[col];
          }
        }
      });
  std::memcpy(fragment, taken.elements, sizeof fragment);
}

inline void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  load_matrices(fragment, address, false);
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
  load_matrices(fragment, address, true);
}

inline void store_matrices(uint32_t address, const uint32_t (&fragment)[4], bool transposed) {
  struct Given {
    uint32_t address;
    bool transposed;
    uint16_t elements[4][2];
  };
  Given own = {address, transposed};
  std::memcpy(own.elements, fragment, sizeof fragment);
  emulator::together<Given, int>(own, [](const Given* const* given, int* const*) {
    for (int number = 0; number < 4 * emulator::kWarp * 2; number++) {
      const int matrix = number / 64, lane = number / 2 % 32, i = number % 2;
      int row = lane / 4, col = lane % 4 * 2 + i;
      if (given[lane]->transposed) std::swap(row, col);
      const uint32_t to = given[8 * matrix + row]->address;
      if (to % 16) emulator::fail("a row of a matrix is not aligned to 16 bytes");
      std::memcpy(emulator::at(to, 16) + 2 * col, &given[lane]->elements[matrix][i], 2);
    }
  });
}

inline void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4]) {
  store_matrices(address, fragment, false);
}

inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4]) {
  store_matrices(address, fragment, true);
}

inline uint32_t movmatrix_trans(uint32_t fragment) {
  return emulator::together<uint32_t, uint32_t>(
      fragment, [](const uint32_t* const* given, uint32_t* const* taken) {
        for (int lane = 0; lane < emulator::kWarp; lane++) {
          uint16_t pair[2];
          for (int i = 0; i < 2; i++) {
            const int row = lane % 4 * 2 + i, col = lane / 4;
            pair[i] = static_cast<uint16_t>(*given[4 * row + col / 2] >> 16 * (col % 2));
          }
          std::memcpy(taken[lane], pair, 4);
        }
      });
}

ALWAYS_INLINE float to_float(uint16_t bits, __half) {
  return __half2float({bits});
}
ALWAYS_INLINE float to_float(uint16_t bits, __nv_bfloat16) {
  return __bfloat162float({bits});
}
inline uint16_t to_bits(float value, __half) {
  return __float2half_rn(value).bits;
}
inline uint16_t to_bits(float value, __nv_bfloat16) {
  return __float2bfloat16_rn(value).bits;
}

// `top` has rows 0 to 7 of c, `bottom` rows 8 to 15.
template <class Element>
void mma(float2& top, float2& bottom, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Element) {
  struct Given {
    float sums[4];
    uint32_t a[4], b[2];
  };
  struct Taken {
    float sums[4];
  };
  const Given own = {{top.x, top.y, bottom.x, bottom.y}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Taken taken = emulator::together<Given, Taken>(
      own, [](const Given* const* given, Taken* const* lanes) UNSEEN {
        typedef float Row __attribute__((vector_size(32)));  // of eight columns
        float w[16][16];
        Row x[16];
        const auto half_of = [](uint32_t word, int upper) {
          return to_float(static_cast<uint16_t>(word >> 16 * upper), Element());
        };
        for (int lane = 0; lane < emulator::kWarp; lane++) {
          const int g = lane / 4, t = lane % 4;
          for (int i = 0; i < 2; i++) {
            for (int part = 0; part < 4; part++) {
              w[g + part % 2 * 8][2 * t + i + part / 2 * 8] = half_of(given[lane]->a[part], i);
            }
            for (int part = 0; part < 2; part++) {
              x[2 * t + i + part * 8][g] = half_of(given[lane]->b[part], i);
            }
          }
        }
        for (int row = 0; row < 16; row++) {
          const int lane = row % 8 * 4, first = row / 8 * 2;  // its first lane, and its sums there
          Row sums;
          for (int col = 0; col < 8; col++)
            sums[col] = given[lane + col / 2]->sums[first + col % 2];
          for (int k = 0; k < 16; k++)
            sums += w[row][k] * x[k];
          for (int col = 0; col < 8; col++)
            lanes[lane + col / 2]->sums[first + col % 2] = sums[col];
        }
      });
  top = {taken.sums[0], taken.sums[1]};
  bottom = {taken.sums[2], taken.sums[3]};
}

// `of` the floats of two pairs, each result rounded.
template <class Element, class Function>
uint32_t of_pairs(uint32_t a, uint32_t b, Element of, Function function) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const float x = to_float(static_cast<uint16_t>(a >> shift), of),
                y = to_float(static_cast<uint16_t>(b >> shift), of);
    result |= static_cast<uint32_t>(to_bits(function(x, y), of)) << shift;
  }
  return result;
}

template <class Element>
uint32_t add(uint32_t a, uint32_t b, Element of) {
  return of_pairs(a, b, of, [](float x, float y) { return x + y; });
}

template <class Element>
uint32_t sub(uint32_t a, uint32_t b, Element of) {
  return of_pairs(a, b, of, [](float x, float y) { return x - y; });
}

template <class Element>
uint32_t mul(uint32_t a, uint32_t b, Element of) {
  return of_pairs(a, b, of, [](float x, float y) { return x * y; });
}

template <class Element>
uint32_t fma(uint32_t a, uint32_t b, uint32_t c, Element of) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto part = [=](uint32_t word) { return to_float(static_cast<uint16_t>(word >> shift), of); };
    result |= static_cast<uint32_t>(to_bits(std::fma(part(a), part(b), part(c)), of)) << shift;
  }
  return result;
}

inline uint32_t halves_of_e4m3(uint16_t both) {
  uint32_t result = 0;
  for (int shift = 0; shift < 16; shift += 8) {
    const int size = both >> shift & 0x7f, exponent = size >> 3, fraction = size & 7;
    float value = std::ldexp(static_cast<float>(exponent ? fraction | 8 : fraction),
                             std::max(exponent, 1) - 10);
    if (size == 0x7f) value = NAN;
    if (both >> shift & 0x80) value = -value;
    result |= static_cast<uint32_t>(__float2half_rn(value).bits) << 2 * shift;
  }
  return result;
}

template <class Element>
uint32_t max_nan(uint32_t a, uint32_t b, Element of) {
  uint32_t larger = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto first = static_cast<uint16_t>(a >> shift),
               second = static_cast<uint16_t>(b >> shift);
    const float x = to_float(first, of), y = to_float(second, of);
    const bool takes_first = x > y || (x == y && !std::signbit(x));
    const uint32_t bits = std::isnan(x) || std::isnan(y) ? 0x7fff : takes_first ? first : second;
    larger |= bits << shift;
  }
  return larger;
}

inline float max_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b);
}

}  // namespace ptx
