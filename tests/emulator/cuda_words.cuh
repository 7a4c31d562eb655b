// Built-ins of CUDA C++: indices of the running thread and its CTA, warp-wide functions, atomics.
#pragma once

#include "cuda_fp16.h"
#include "machine.cuh"

struct BlockIndex {
  struct {
    operator uint32_t() const { return emulator::cta->index; }
  } x;
};
inline BlockIndex blockIdx;
struct ThreadIndex {
  struct {
    operator uint32_t() const { return emulator::cta->running->thread; }
  } x;
};
inline ThreadIndex threadIdx;

inline void __threadfence() {}

inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}

inline unsigned long long atomicMax(unsigned long long* to, unsigned long long value) {
  const unsigned long long before = *to;
  *to = std::max(before, value);
  return before;
}

inline uint32_t atomicOr(uint32_t* to, uint32_t bits) {
  const uint32_t before = *to;
  *to |= bits;
  return before;
}

inline uint32_t atomicAnd(uint32_t* to, uint32_t bits) {
  const uint32_t before = *to;
  *to &= bits;
  return before;
}

inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}

inline void __syncwarp() {
  emulator::together<int, int>(0, [](const int* const*, int* const*) {});
}

template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  struct Given {
    T value;
    int lane;
  };
  return emulator::together<Given, T>({value, lane},
                                      [](const Given* const* given, T* const* taken) {
                                        for (int i = 0; i < emulator::kWarp; i++) {
                                          *taken[i] = given[given[i]->lane]->value;
                                        }
                                      });
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  return emulator::together<bool, uint32_t>(value,
                                            [](const bool* const* given, uint32_t* const* taken) {
                                              uint32_t all = 0;
                                              for (int i = 0; i < emulator::kWarp; i++)
                                                all |= static_cast<uint32_t>(*given[i]) << i;
                                              for (int i = 0; i < emulator::kWarp; i++)
                                                *taken[i] = all;
                                            });
}

template <class T, class Combine>
T reduced(T value, Combine combine) {
  return emulator::together<T, T>(value, [combine](const T* const* given, T* const* taken) {
    T all = *given[0];
    for (int i = 1; i < emulator::kWarp; i++)
      all = combine(all, *given[i]);
    for (int i = 0; i < emulator::kWarp; i++)
      *taken[i] = all;
  });
}
template <class T>
T __reduce_max_sync(uint32_t, T value) {
  return reduced(value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_add_sync(uint32_t, T value) {
  return reduced(value, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_min_sync(uint32_t, T value) {
  return reduced(value, [](T a, T b) { return std::min(a, b); });
}

inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}

inline int __ffs(uint32_t bits) {
  return __builtin_ffs(bits);
}

template <class T>
T __shfl_xor_sync(uint32_t all, T value, int mask) {
  return __shfl_sync(all, value, static_cast<int>(threadIdx.x % emulator::kWarp) ^ mask);
}

struct BlockSize {
  struct {
    operator uint32_t() const { return static_cast<uint32_t>(emulator::cta->fibers.size()); }
  } x;
};
inline BlockSize blockDim;
