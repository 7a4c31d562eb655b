// native/wgmma.cuh for a host compiler. Products read their operands when the thread waits for
// them.
#pragma once

#include "ptx.cuh"

namespace ptx {

inline uint64_t matrix_descriptor(uint32_t address) {
  return address >> 4;
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
}

inline void wgmma_wait_but_one() {
  wait_for_all_but(1);
}

template <class Sums>
void wgmma_wait(const Sums&) {
  wait_for_all_but(0);
}

// Element [row][k] of the swizzled matrix of a descriptor.
template <class Element>
float element(uint64_t descriptor, int row, int k, Element of) {
  const uint32_t flat = static_cast<uint32_t>(descriptor << 4) + row * 128 + 2 * k;
  uint16_t bits;
  std::memcpy(&bits, emulator::at(flat ^ (flat >> 7 & 7) << 4, 2), 2);
  return to_float(bits, of);
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

}  // namespace ptx
