// Warpgroup matrix multiplication of sm_90a (PTX ISA 8.x, section 9.7.15): four warps multiply 64
// rows of A by some of B, both in shared memory, asynchronously; accumulators are in registers.
#pragma once

#include "ptx.cuh"

namespace ptx {

// The descriptor of a matrix at a shared address, K-major in rows of 128 bytes with 128-byte
// swizzle; every 8 rows are 1 KiB, aligned to 1 KiB. Adding 2 to a descriptor moves it by
// 16 elements along K.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = (1024ull >> 4) << 32;
  return kSwizzle128 | kEightRows | address >> 4;  // shared addresses are below 256 KiB: 14 bits
}

// The same for B of a product with A B, of rows of 64 columns: K of them, 128 bytes each, are a
// panel, and panels for further columns are `panel` bytes apart.
__device__ __forceinline__ uint64_t matrix_descriptor_trans(uint32_t address, uint32_t panel) {
  return matrix_descriptor(address) | static_cast<uint64_t>(panel >> 4) << 16;
}

// Orders writes of the accumulators by other instructions before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most one committed group of products is in flight.
__device__ __forceinline__ void wgmma_wait_but_one() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Makes the compiler read `acc` after what comes before.
template <int size>
__device__ __forceinline__ void pin(float2 (&acc)[size]) {
#pragma unroll
  for (int i = 0; i < size; i++)
    asm volatile("" : "+f"(acc[i].x), "+f"(acc[i].y)::"memory");
}

// Computes sums before the waits that follow; ptxas would begin with the wait. A store that never
// happens depends on them: they are not negative.
__device__ __forceinline__ void compute_now(float sum, float other, uint32_t address) {
  asm volatile(
      "{\n.reg .pred never;\n.reg .f32 least;\nmin.f32 least, %0, %1;\n"
      "setp.lt.f32 never, least, 0f00000000;\n@never st.shared::cta.f32 [%2], least;\n}" ::"f"(sum),
      "f"(other), "r"(address)
      : "memory");
}

// Waits until at most one committed group of products is in flight; `acc` are not of that one.
template <int size>
__device__ __forceinline__ void wgmma_wait_but_one(float2 (&acc)[size]) {
  wgmma_wait_but_one();
  pin(acc);
}

// Waits until no product is in flight; `acc` are of the last.
template <int size>
__device__ __forceinline__ void wgmma_wait_for(float2 (&acc)[size]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin(acc);
}

// Waits until no product is in flight. Accumulators must not be read before.
template <int sets, int size>
__device__ __forceinline__ void wgmma_wait(float2 (&acc)[sets][size]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int set = 0; set < sets; set++) {
#pragma unroll
    for (int i = 0; i < size; i++)
      asm volatile("" : "+f"(acc[set][i].x), "+f"(acc[set][i].y)::"memory");
  }
}

// acc += A B^T for 64 rows of A, 8 to 256 rows of B, and 16 columns of both (K). In lane 4g + t of
// warp w, acc[2i] is row 16 w + g of A, acc[2i + 1] row 16 w + g + 8, each with rows 8i + 2t and
// 8i + 2t + 1 of B.
#define WGMMA_ACC(i) \
  "+f"(acc[2 * (i)].x), "+f"(acc[2 * (i)].y), "+f"(acc[2 * (i) + 1].x), "+f"(acc[2 * (i) + 1].y)
#define WGMMA_2_ACC(i) WGMMA_ACC(i), WGMMA_ACC(i + 1)
#define WGMMA_4_ACC(i) WGMMA_2_ACC(i), WGMMA_2_ACC(i + 2)
#define WGMMA_8_ACC(i) WGMMA_4_ACC(i), WGMMA_4_ACC(i + 4)
#define WGMMA_16_ACC(i) WGMMA_8_ACC(i), WGMMA_8_ACC(i + 8)
#define WGMMA_ASM(rows, type, registers, a_register, b_register, ...)                           \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" rows \
               "k16.f32." type "." type " {" registers "}, %" a_register ", %" b_register       \
               ", p, 1, 1, 0, 0;\n}"                                                            \
               : __VA_ARGS__                                                                    \
               : "l"(a), "l"(b))
#define WGMMA_4 "%0, %1, %2, %3"
#define WGMMA_8 WGMMA_4 ", %4, %5, %6, %7"
#define WGMMA_16 WGMMA_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_32                                                             \
  WGMMA_16                                                                   \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31"
#define WGMMA_48 \
  WGMMA_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_64                             \
  WGMMA_32                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_96                             \
  WGMMA_64                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71" \
  ", %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87" \
  ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_112                                \
  WGMMA_96                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103" \
  ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_128                                    \
  WGMMA_96                                           \
  ", %96, %97, %98, %99, %100, %101, %102, %103"     \
  ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"
#define DEFINE_WGMMA(type, Element)                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[2], uint64_t a, uint64_t b, Element) {  \
    WGMMA_ASM("8", type, WGMMA_4, "4", "5", WGMMA_ACC(0));                                   \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[4], uint64_t a, uint64_t b, Element) {  \
    WGMMA_ASM("16", type, WGMMA_8, "8", "9", WGMMA_2_ACC(0));                                \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[8], uint64_t a, uint64_t b, Element) {  \
    WGMMA_ASM("32", type, WGMMA_16, "16", "17", WGMMA_4_ACC(0));                             \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[16], uint64_t a, uint64_t b, Element) { \
    WGMMA_ASM("64", type, WGMMA_32, "32", "33", WGMMA_8_ACC(0));                             \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[24], uint64_t a, uint64_t b, Element) { \
    WGMMA_ASM("96", type, WGMMA_48, "48", "49", WGMMA_8_ACC(0), WGMMA_4_ACC(8));             \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[32], uint64_t a, uint64_t b, Element) { \
    WGMMA_ASM("128", type, WGMMA_64, "64", "65", WGMMA_16_ACC(0));                           \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[48], uint64_t a, uint64_t b, Element) { \
    WGMMA_ASM("192", type, WGMMA_96, "96", "97", WGMMA_16_ACC(0), WGMMA_8_ACC(16));          \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[56], uint64_t a, uint64_t b, Element) { \
    WGMMA_ASM("224", type, WGMMA_112, "112", "113", WGMMA_16_ACC(0), WGMMA_8_ACC(16),        \
              WGMMA_4_ACC(24));                                                              \
  }                                                                                          \
  __device__ __forceinline__ void wgmma(float2(&acc)[64], uint64_t a, uint64_t b, Element) { \
    WGMMA_ASM("256", type, WGMMA_128, "128", "129", WGMMA_16_ACC(0), WGMMA_16_ACC(16));      \
  }
DEFINE_WGMMA("f16", __half)
DEFINE_WGMMA("bf16", __nv_bfloat16)

// The same with A in registers: of rows 16 w + g and 16 w + g + 8, columns 2t and 2t + 1, then of
// both rows columns 2t + 8 and 2t + 9. They are read until the product is complete.
#define WGMMA_REGISTERS_ASM(rows, type, registers, a_registers, b_register, flag, trans, ...) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" flag                                      \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" rows "k16.f32." type "." type        \
               " {" registers "}, {" a_registers "}, %" b_register ", p, 1, 1, " trans ";\n}" \
               : __VA_ARGS__                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))

// wgmma: acc = A B^T, or with `adds` acc += A B^T, for 64 to 256 rows of B.
// wgmma_trans: acc += A B for 64 or 128 columns of B, given by matrix_descriptor_trans().
#define DEFINE_WGMMA_REGISTERS(type, Element)                                                 \
  __device__ __forceinline__ void wgmma(float2(&acc)[16], const uint32_t (&a)[4], uint64_t b, \
                                        bool adds, Element) {                                 \
    WGMMA_REGISTERS_ASM("64", type, WGMMA_32, "%32, %33, %34, %35", "36", "37", "0",          \
                        WGMMA_8_ACC(0));                                                      \
  }                                                                                           \
  __device__ __forceinline__ void wgmma(float2(&acc)[32], const uint32_t (&a)[4], uint64_t b, \
                                        bool adds, Element) {                                 \
    WGMMA_REGISTERS_ASM("128", type, WGMMA_64, "%64, %65, %66, %67", "68", "69", "0",         \
                        WGMMA_16_ACC(0));                                                     \
  }                                                                                           \
  __device__ __forceinline__ void wgmma(float2(&acc)[48], const uint32_t (&a)[4], uint64_t b, \
                                        bool adds, Element) {                                 \
    WGMMA_REGISTERS_ASM("192", type, WGMMA_96, "%96, %97, %98, %99", "100", "101", "0",       \
                        WGMMA_16_ACC(0), WGMMA_8_ACC(16));                                    \
  }                                                                                           \
  __device__ __forceinline__ void wgmma(float2(&acc)[64], const uint32_t (&a)[4], uint64_t b, \
                                        bool adds, Element) {                                 \
    WGMMA_REGISTERS_ASM("256", type, WGMMA_128, "%128, %129, %130, %131", "132", "133", "0",  \
                        WGMMA_16_ACC(0), WGMMA_16_ACC(16));                                   \
  }                                                                                           \
  __device__ __forceinline__ void wgmma_trans(float2(&acc)[16], const uint32_t (&a)[4],       \
                                              uint64_t b, Element) {                          \
    constexpr bool adds = true;                                                               \
    WGMMA_REGISTERS_ASM("64", type, WGMMA_32, "%32, %33, %34, %35", "36", "37", "1",          \
                        WGMMA_8_ACC(0));                                                      \
  }                                                                                           \
  __device__ __forceinline__ void wgmma_trans(float2(&acc)[32], const uint32_t (&a)[4],       \
                                              uint64_t b, Element) {                          \
    constexpr bool adds = true;                                                               \
    WGMMA_REGISTERS_ASM("128", type, WGMMA_64, "%64, %65, %66, %67", "68", "69", "1",         \
                        WGMMA_16_ACC(0));                                                     \
  }
DEFINE_WGMMA_REGISTERS("f16", __half)
DEFINE_WGMMA_REGISTERS("bf16", __nv_bfloat16)

}  // namespace ptx
