// native/wgmma.cuh for a host compiler. Products read their operands when the thread waits for
// them.
#pragma once

#include "ptx.cuh"

namespace ptx {

inline uint64_t matrix_descriptor(uint32_t address) {
  return address >> 4;
}

inline uint64_t matrix_descriptor_trans(uint32_t address, uint32_t panel) {
  return address >> 4 | static_cast<uint64_t>(panel) << 32;
}

inline void wgmma_fence() {
  __syncwarp();
}

inline void wgmma_commit() {
  __syncwarp();
  emulator::commit_products();
}

inline void wait_for_all_but(size_t groups) {
  __syncwarp();
  emulator::multiply_all_but(groups);
  __syncwarp();  // products read other lanes' registers
}

inline void wgmma_wait_but_one() {
  wait_for_all_but(1);
}

template <class Sums>
void wgmma_wait(const Sums&) {
  wait_for_all_but(0);
}

template <class Sums>
void wgmma_wait_but_one(const Sums&) {
  wait_for_all_but(1);
}
template <class Sums>
void wgmma_wait_for(const Sums&) {
  wait_for_all_but(0);
}
inline void compute_now(float, float, uint32_t) {}

// Elements that lie together at an address before swizzling, in one of the chunks that it moves.
template <int count, class Element>
UNSEEN void elements_at(uint32_t flat, float* elements, Element of) {
  uint16_t bits[count];
  const uint32_t address = flat ^ (flat >> 7 & 7) << 4;
  std::memcpy(bits, emulator::at(address, sizeof bits), sizeof bits);
  if (cta->writers[address / emulator::kChunk]) emulator::touch_async(*cta, address, sizeof bits);
  for (int i = 0; i < count; i++)
    elements[i] = to_float(bits[i], of);
}

// Elements [row][0 to 15] of the swizzled matrix of a descriptor.
template <class Element>
UNSEEN void row_of(uint64_t descriptor, int row, float (&elements)[16], Element of) {
  const uint32_t flat = static_cast<uint32_t>(descriptor << 4) + row * 128;
  elements_at<8>(flat, elements, of);
  elements_at<8>(flat + 16, elements + 8, of);
}

// Add products with two columns of B, of which `b` has the elements of a k together.
UNSEEN inline void add_products(float2* sums, const float (&rows)[2][16], const float (&b)[16][2]) {
  for (int k = 0; k < 16; k++) {
    for (int j = 0; j < 2; j++)
      sums[j].x += rows[j][k] * b[k][0], sums[j].y += rows[j][k] * b[k][1];
  }
}

// Columns `col` and `col` + 1 of B, whose columns are the rows of a descriptor's matrix.
template <class Element>
UNSEEN void columns_of(uint64_t descriptor, int col, float (&b)[16][2], Element of) {
  float columns[2][16];
  row_of(descriptor, col, columns[0], of);
  row_of(descriptor, col + 1, columns[1], of);
  for (int k = 0; k < 16; k++)
    b[k][0] = columns[0][k], b[k][1] = columns[1][k];
}

// Columns `col`, which is even, and `col` + 1 of the swizzled panels of a transposed descriptor.
template <class Element>
UNSEEN void columns_of_trans(uint64_t descriptor, int col, float (&b)[16][2], Element of) {
  const uint32_t panel = static_cast<uint32_t>(descriptor >> 32);
  const uint32_t flat = static_cast<uint32_t>(descriptor << 4) + col / 64 * panel + 2 * (col % 64);
  for (int k = 0; k < 16; k++)
    elements_at<2>(flat + k * 128, b[k], of);
}

template <int size, class Element>
void wgmma(float2 (&sums)[size], uint64_t a, uint64_t b, Element of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
  emulator::multiply_later([&sums, a, b, of, warp, g, t]() UNSEEN {
    float rows[2][16], columns[16][2];
    for (int i = 0; i < 2; i++)
      row_of(a, 16 * warp + g + 8 * i, rows[i], of);
    for (int i = 0; i < size; i += 2) {
      columns_of(b, i / 2 * 8 + 2 * t, columns, of);
      add_products(&sums[i], rows, columns);
    }
  });
}

// With A in registers, which are read when the thread waits. `b_of` reads two columns of B.
template <int size, class Element, class Function>
void multiply_registers(float2 (&sums)[size], const uint32_t (&a)[4], bool adds, Element of,
                        Function b_of) {
  struct Taken {
    const uint32_t* of[4];  // the A of the lanes with the same rows
  };
  const Taken quad = emulator::together<const uint32_t*, Taken>(
      a, [](const uint32_t* const* const* given, Taken* const* lanes) {
        for (int lane = 0; lane < emulator::kWarp; lane++) {
          for (int t = 0; t < 4; t++)
            lanes[lane]->of[t] = *given[lane / 4 * 4 + t];
        }
      });
  const int t = threadIdx.x % 4;
  emulator::multiply_later([&sums, quad, adds, of, b_of, t]() UNSEEN {
    float rows[2][16], columns[16][2];
    for (int k = 0; k < 16; k++) {
      for (int i = 0; i < 2; i++) {
        const uint32_t word = quad.of[k % 8 / 2][k / 8 * 2 + i];
        rows[i][k] = to_float(static_cast<uint16_t>(word >> 16 * (k % 2)), of);
      }
    }
    for (int i = 0; i < size; i += 2) {
      for (int j = 0; j < 2 && !adds; j++)
        sums[i + j] = {0.0f, 0.0f};
      b_of(i / 2 * 8 + 2 * t, columns);
      add_products(&sums[i], rows, columns);
    }
  });
}

template <int size, class Element>
void wgmma(float2 (&sums)[size], const uint32_t (&a)[4], uint64_t b, bool adds, Element of) {
  multiply_registers(sums, a, adds, of, [b, of](int col, float (&columns)[16][2]) {
    columns_of(b, col, columns, of);
  });
}

template <int size, class Element>
void wgmma_trans(float2 (&sums)[size], const uint32_t (&a)[4], uint64_t b, Element of) {
  multiply_registers(sums, a, true, of, [b, of](int col, float (&columns)[16][2]) {
    columns_of_trans(b, col, columns, of);
  });
}

}  // namespace ptx
