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
  cta->running->groups.emplace_back(std::move(cta->running->products));
  cta->running->products.clear();
}

inline void wait_for_all_but(size_t groups) {
  __syncwarp();
  auto& pending = cta->running->groups;
  while (pending.size() > groups) {
    for (const auto& product : pending.front())
      product();
    pending.pop_front();
  }
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

// Element at an address before swizzling.
template <class Element>
float element_at(uint32_t flat, Element of) {
  uint16_t bits;
  const uint32_t address = flat ^ (flat >> 7 & 7) << 4;
  std::memcpy(&bits, emulator::at(address, 2), 2);
  if (cta->writers[address / emulator::kChunk]) emulator::touch_async(*cta, address, 2);
  return to_float(bits, of);
}

// Element [row][k] of the swizzled matrix of a descriptor.
template <class Element>
float element(uint64_t descriptor, int row, int k, Element of) {
  return element_at(static_cast<uint32_t>(descriptor << 4) + row * 128 + 2 * k, of);
}

// Element [k][col] of the swizzled panels of a transposed descriptor.
template <class Element>
float element_trans(uint64_t descriptor, int k, int col, Element of) {
  const uint32_t panel = static_cast<uint32_t>(descriptor >> 32);
  const uint32_t flat = static_cast<uint32_t>(descriptor << 4) + col / 64 * panel + k * 128;
  return element_at(flat + 2 * (col % 64), of);
}

template <int size, class Element>
void wgmma(float2 (&sums)[size], uint64_t a, uint64_t b, Element of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
  cta->running->products.push_back([&sums, a, b, of, warp, g, t] {
    float rows[2][16];
    for (int k = 0; k < 16; k++) {
      for (int i = 0; i < 2; i++)
        rows[i][k] = element(a, 16 * warp + g + 8 * i, k, of);
    }
    for (int i = 0; i < size; i += 2) {
      for (int k = 0; k < 16; k++) {
        const int col = i / 2 * 8 + 2 * t;
        const float x = element(b, col, k, of), y = element(b, col + 1, k, of);
        for (int j = 0; j < 2; j++)
          sums[i + j].x += rows[j][k] * x, sums[i + j].y += rows[j][k] * y;
      }
    }
  });
}

// With A in registers, which are read when the thread waits. `b_of(k, col)` is an element of B.
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
  cta->running->products.push_back([&sums, quad, adds, of, b_of, t] {
    float rows[2][16];
    for (int k = 0; k < 16; k++) {
      for (int i = 0; i < 2; i++) {
        const uint32_t word = quad.of[k % 8 / 2][k / 8 * 2 + i];
        rows[i][k] = to_float(static_cast<uint16_t>(word >> 16 * (k % 2)), of);
      }
    }
    for (int i = 0; i < size; i += 2) {
      for (int j = 0; j < 2 && !adds; j++)
        sums[i + j] = {0.0f, 0.0f};
      for (int k = 0; k < 16; k++) {
        const int col = i / 2 * 8 + 2 * t;
        const float x = b_of(k, col), y = b_of(k, col + 1);
        for (int j = 0; j < 2; j++)
          sums[i + j].x += rows[j][k] * x, sums[i + j].y += rows[j][k] * y;
      }
    }
  });
}

template <int size, class Element>
void wgmma(float2 (&sums)[size], const uint32_t (&a)[4], uint64_t b, bool adds, Element of) {
  multiply_registers(sums, a, adds, of, [b, of](int k, int col) { return element(b, col, k, of); });
}

template <int size, class Element>
void wgmma_trans(float2 (&sums)[size], const uint32_t (&a)[4], uint64_t b, Element of) {
  multiply_registers(sums, a, true, of,
                     [b, of](int k, int col) { return element_trans(b, k, col, of); });
}

}  // namespace ptx
