// What the instructions share: integers, addresses; and those of a single thread or warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

// CUtensorMap of the driver's API, which NVRTC has no header for.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

namespace ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes at once, of shared and of global memory.

__device__ __forceinline__ uint4 load_chunk(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

__device__ __forceinline__ void store_chunk(void* to, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

// True in one thread of a warp, all of which come here; the compiler then knows it is one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected;
}

// The same value, which the compiler takes for another one: what is reckoned from it in a loop is
// then not reckoned ahead, to stay in registers throughout.
template <class Word>
__device__ __forceinline__ Word anew(Word value) {
  asm volatile("" : "+r"(value));
  return value;
}

// 2 to the power of `value`; zero where that is no normal number.
__device__ __forceinline__ float exp2(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// For about so long, at most twice.
__device__ __forceinline__ void sleep(uint32_t ns) {
  asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

// By all four warps of a warpgroup: registers that a thread gives back, or takes from then on.

template <int registers>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Programmatic dependent launch: let the next kernel of the stream start; wait until the kernels
// before are complete and their writes visible.

__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_dependencies() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace ptx
