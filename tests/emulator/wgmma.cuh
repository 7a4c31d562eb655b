// native/wgmma.cuh for a host compiler: what a thread's products read, they read when it waits.
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

// The element at `row` and `k` of a swizzled matrix whose descriptor this is.
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
    for (int i = 0; i < size; i++) {
      const int row = 16 * warp + g + i % 2 * 8, col = i / 2 * 8 + 2 * t;
      for (int k = 0; k < 16; k++) {
        const float w = element(a, row, k, of);
        sums[i].x += w * element(b, col, k, of);
        sums[i].y += w * element(b, col + 1, k, of);
      }
    }
  });
}

}  // namespace ptx
