// Elements of 4 and 8 bits become pairs of 16-bit floats: shifts, masks, and one or two operations
// on pairs. A lane's elements of an atom are those of its fragments for mma and wgmma.
#pragma once

#include "element.cuh"
#include "format.cuh"

constexpr int kWordSteps = kCodeBits == 4 ? 2 : 1;  // of 16 columns, in a 32-bit word
constexpr int kWordPairs = 2 * kWordSteps;
constexpr int kAtomWords = 4 / kWordSteps;          // of a lane

// The same 16-bit float twice.
__device__ __forceinline__ constexpr uint32_t twice(uint32_t half) {
  return half << 16 | half;
}

// 128 or 1,024, whose last bit is 1: the bits of a small integer added to it are those of the sum.
constexpr uint32_t kMagic = twice(BFLOAT16 ? 0x4300 : 0x6400);

// What is added to an integer that was read with kMagic: -(kMagic + zero). Integers of 8 bits have
// too many for bfloat16, they are read as signed ones: 128 - zero.
__device__ __forceinline__ uint32_t offset_of(uint32_t zero) {
  if (BFLOAT16 && CODE == kInt8) {
    const float offset = 128.0f - static_cast<float>(zero);
    return packed(offset, offset);
  }
  return kMagic | twice(0x8000 | zero);
}

// Pair `number` of a word of floats, of columns 8 * number + 2t and 8 * number + 2t + 1: their sign,
// exponent and mantissa where a 16-bit float has them, which is the value times 2^-kBias, also for
// subnormal numbers. e4m3's code 0x7F, which is NaN, becomes 480.
constexpr int kBias = (BFLOAT16 ? 127 : 15) - (CODE == kE2m1 ? 1 : 7);
__device__ __forceinline__ uint32_t placed(uint32_t word, int number) {
  if (CODE == kE4m3) {
    // Above each code eight times its sign.
    const uint32_t pair = ptx::bytes_of(word, number == 0 ? 0xa280 : 0xb391);
    return BFLOAT16 ? pair << 4 & 0x87f087f0 : pair << 7 & 0xbf80bf80;
  }
  if (BFLOAT16) {  // a product shifts codes by two numbers at once, and is no work for the ALU
    const uint32_t codes = (number < 2 ? word : word >> 8) & 0x000f000f << number % 2 * 4;
    return codes * ((1 << 12 | 1 << 6) >> number % 2 * 4) & 0x81c081c0;
  }
  const uint32_t top = word << 12 - 4 * number;
  return (top & 0x80008000) | (top >> 3 & 0x0e000e00);
}

// The part of kBias that scales of e4m3 make up for: times 2^kScaleBias none is infinite.
constexpr int kScaleBias = BFLOAT16 ? 118 : 7;

// 2^power as a 16-bit float, twice.
__device__ __forceinline__ constexpr uint32_t power_pair(int power) {
  return twice(BFLOAT16 ? power + 127 << 7 : power + 15 << 10);
}

// Pair `number` of a word without its scale. e4m3's NaN becomes 480.
__device__ __forceinline__ uint32_t expanded(uint32_t word, int number, uint32_t offset) {
  if (CODE == kInt4)
    return ptx::add(ptx::and_or(word >> 4 * number, 0x000f000f, kMagic), offset, Element());
  if (CODE == kInt8) {
    const uint32_t bytes = word >> 8 * number;
    if (!BFLOAT16) return ptx::add(ptx::and_or(bytes, 0x00ff00ff, kMagic), offset, Element());
    // Seven bits, less 128 or 256 by the inverted eighth: the exponent's last bit.
    const uint32_t low = ptx::and_or(bytes, 0x007f007f, kMagic),
                   high = ptx::and_or(~bytes, 0x00800080, kMagic);
    const uint32_t value = ptx::sub(low, high, Element());
    return ZEROS ? ptx::add(value, offset, Element()) : value;
  }
  return ptx::mul(placed(word, number), power_pair(kBias), Element());
}

// An expanded pair of e4m3, but NaN where it has 480; other numbers are at most 448. Times
// 1.125 * 2^119, or in float16 2^7, only 480 becomes infinite, and infinity times zero NaN.
__device__ __forceinline__ uint32_t with_nan(uint32_t pair) {
  if (CODE != kE4m3) return pair;
  const uint32_t large = ptx::mul(pair, twice(BFLOAT16 ? 0x7b10 : 0x5880), Element());
  return ptx::fma(large, 0, pair, Element());
}

__device__ __forceinline__ float factor_of(const uint8_t* unit, int row) {
  return reinterpret_cast<const float*>(unit + kFactorsAt)[row];
}

// Scales and zeros of a row of an atom. Steps are of 16 columns. A negative scale of e4m3 marks a
// group with a code that is NaN.
struct RowScales {
  static constexpr int kGroups = GROUP < ATOM_COLS ? ATOM_COLS / GROUP : 1;
  static constexpr int kBytes = kGroups * SCALE_BYTES;

  // Not empty either where the elements of 16 bits have no scales.
  uint32_t scales[kBytes > 4 ? kBytes / 4 : 1], zeros[(kGroups + 1) / 2];
  float factor = 0.0f;

  // For products: a NaN in a row makes all its outputs NaN, so a marked group's scale may be NaN,
  // which are ones in all bits.
  __device__ __forceinline__ void load(const uint8_t* unit, int atom, int row) {
    load_marked(unit, atom, row);
#pragma unroll
    for (uint32_t& word : scales)
      if (CODE == kE4m3) word |= ptx::bytes_of(word, SCALE_BYTES == 4 ? 0xbbbb : 0xbb99);
  }
  // For weights.
  __device__ __forceinline__ void load_bare(const uint8_t* unit, int atom, int row) {
    load_marked(unit, atom, row);
#pragma unroll
    for (uint32_t& word : scales)
      if (CODE == kE4m3) word &= SCALE_BYTES == 4 ? 0x7fffffff : 0x7fff7fff;
  }

  __device__ __forceinline__ void load_marked(const uint8_t* unit, int atom, int row) {
    const int first = row * kUnitGroups + atom * ATOM_COLS / GROUP;
    words<kBytes>(unit + kScalesAt + first * SCALE_BYTES, scales);
    if (ZEROS) words<2 * kGroups>(unit + kZerosAt + first * 2, zeros);
    if (SCALE_BYTES == 1) factor = factor_of(unit, row);
  }

  __device__ __forceinline__ float scale(int step) const {
    const int group = step * 16 / GROUP;
    if (SCALE_BYTES == 4) return __uint_as_float(scales[group]);
    const uint32_t word = scales[group * SCALE_BYTES / 4] >> group * SCALE_BYTES % 4 * 8;
    if (SCALE_BYTES == 2) return unpacked(word).x;
    return __half2float(__ushort_as_half(ptx::halves_of_e4m3(word & 0xff) & 0xffff)) * factor;
  }
  // The scale twice, of 16 bits; of e4m3 times 2^kScaleBias, and without the factor.
  __device__ __forceinline__ uint32_t scale_pair(int step) const {
    const int group = step * 16 / GROUP;
    if (SCALE_BYTES == 1) {
      const uint32_t both = ptx::halves_of_e4m3(scales[0] >> group / 2 * 16 & 0xffff);
      const __half* const of = reinterpret_cast<const __half*>(&both);
      const uint32_t two = BFLOAT16 ? packed(__half2float(of[0]), __half2float(of[1])) : both;
      const uint32_t pair = ptx::mul(two, power_pair(kScaleBias), Element());
      return ptx::half_twice(pair, group % 2);
    }
    return ptx::half_twice(scales[group / 2], group % 2);
  }
  __device__ __forceinline__ uint32_t offset(int step) const {
    const int group = step * 16 / GROUP;
    if (ZEROS) return offset_of(zeros[group / 2] >> group % 2 * 16 & 0xffff);
    return offset_of(CODE == kInt8 ? 128 : 8);
  }

 private:
  template <int bytes>
  __device__ __forceinline__ static void words(const uint8_t* from, uint32_t* to) {
    if (bytes == 1) {
      to[0] = *from;
    } else if (bytes == 2) {
      to[0] = *reinterpret_cast<const uint16_t*>(from);
    } else if (bytes == 4) {
      to[0] = *reinterpret_cast<const uint32_t*>(from);
    } else if (bytes == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      to[0] = two.x, to[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < bytes / 16; i++) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i];
        to[4 * i] = four.x, to[4 * i + 1] = four.y;
        to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
      }
    }
  }
};

// A pair times its scale, rounded once.
__device__ __forceinline__ uint32_t scaled(uint32_t pair, const RowScales& scales, int step) {
  if (SCALE_BYTES == 2) return ptx::mul(pair, scales.scale_pair(step), Element());
  const float2 values = unpacked(pair);
  const float scale = scales.scale(step);
  return packed(values.x * scale, values.y * scale);
}

// A lane's codes of `steps` steps of an atom, of 16 columns each.
template <int steps>
struct Codes {
  uint32_t words[steps / kWordSteps];

  // From step `first` of atom `atom` of a unit on.
  __device__ __forceinline__ void load(const uint8_t* unit, int atom, int first, int lane) {
    constexpr int kWords = steps / kWordSteps;
    const int word = lane * kAtomWords + first / kWordSteps;
    const uint8_t* const from = unit + atom * kCodesBytes + 4 * word;
    if constexpr (kWords == 4) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (kWords == 2) {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      words[0] = both.x, words[1] = both.y;
    } else {
      words[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }

  // The pairs of step `step`, of columns 16 * step + 2t and + 1, and + 8 and + 9, without scales.
  __device__ __forceinline__ void expand(int step, const RowScales& scales,
                                         uint32_t (&pairs)[2]) const {
    const uint32_t word = words[step % steps / kWordSteps], offset = scales.offset(step);
    const int first = step % kWordSteps * 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
      pairs[i] = expanded(word, first + i, offset);
  }
  // The same of floats, but placed.
  __device__ __forceinline__ void place(int step, uint32_t (&pairs)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; i++)
      pairs[i] = placed(words[step % steps / kWordSteps], step % kWordSteps * 2 + i);
  }
};

// A lane's pairs of an atom, scaled: those of columns 8 i + 2t and 8 i + 2t + 1 of its row.
struct Pairs {
  uint32_t of[kAtomChunks];

  __device__ __forceinline__ Pairs(const uint8_t* unit, int atom, int lane) {
    RowScales scales;
    Codes<4> codes;
    scales.load_bare(unit, atom, lane / 4);
    codes.load(unit, atom, 0, lane);
#pragma unroll
    for (int step = 0; step < 4; step++) {
      uint32_t both[2];
      codes.expand(step, scales, both);
#pragma unroll
      for (int i = 0; i < 2; i++)
        of[2 * step + i] = scaled(with_nan(both[i]), scales, step);
    }
  }

  // Stores a warp's pairs as an atom of 16-bit elements at a shared address.
  __device__ __forceinline__ void store(uint32_t to, int lane) const {
    const int row = lane % 8;
#pragma unroll
    for (int i = 0; i < kAtomChunks; i += 4) {
      const uint32_t four[4] = {of[i], of[i + 1], of[i + 2], of[i + 3]};
      ptx::stmatrix_x4(to + row * 128 + ((i + lane / 8 ^ row) << 4), four);
    }
  }
};

// Columns 8 * number to 8 * number + 7 of a row of a unit, scaled.
__device__ __forceinline__ uint4 chunk_of_unit(const uint8_t* unit, int row, int number) {
  const int atom = number / kAtomChunks, chunk = number % kAtomChunks;
  const auto* const words =
      reinterpret_cast<const uint32_t*>(unit + atom * kCodesBytes) + row * 4 * kAtomWords;
  RowScales scales;
  scales.load_bare(unit, atom, row);
  uint32_t pairs[4];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    // Shifts are of constants where loops are unrolled, here of the chunk's index in the word.
    const uint32_t word = words[t * kAtomWords + chunk / kWordPairs];
    pairs[t] = 0;
#pragma unroll
    for (int i = 0; i < kAtomChunks; i++) {
      if (i != chunk) continue;
      const uint32_t pair = expanded(word, i % kWordPairs, scales.offset(i / 2));
      pairs[t] = scaled(with_nan(pair), scales, i / 2);
    }
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}
