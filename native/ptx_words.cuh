// Integer types, addresses, and instructions of a single thread or warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

// CUtensorMap of the driver API, for which NVRTC has no header.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

namespace ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16-byte accesses to shared and global memory.

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

// True in one thread of the warp, all of whose threads call this; the compiler knows it is one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected;
}

// The same value, opaque to the compiler: values computed from it in a loop are not hoisted out of
// the loop, where they would occupy registers.
template <class Word>
__device__ __forceinline__ Word opaque(Word value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ const uint8_t* opaque(const uint8_t* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// word & mask | bits in one instruction; the compiler makes two of it where both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}

// Bytes of `word`: each four bits of `selector` have the number of a byte, or 8 more for eight times
// the byte's highest bit.
__device__ __forceinline__ uint32_t bytes_of(uint32_t word, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "r"(selector));
  return result;
}

// The low or the high half of a word, twice. As an operand of a multiplication it is no instruction.
__device__ __forceinline__ uint32_t half_twice(uint32_t word, bool high) {
  uint16_t halves[2];
  uint32_t result;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(halves[0]), "=h"(halves[1]) : "r"(word));
  asm("mov.b32 %0, {%1, %1};" : "=r"(result) : "h"(halves[high]));
  return result;
}

// 2 to the power of `value`; subnormal results are zero.
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

// Sleep for about `ns`, at most twice as long.
__device__ __forceinline__ void sleep(uint32_t ns) {
  asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

// Set the registers per thread of a warpgroup, called by its four warps: release some, or take
// more.

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Programmatic dependent launch (PDL): let the next kernel of the stream start; wait until
// predecessor kernels are complete and their writes visible.

__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_dependencies() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace ptx
