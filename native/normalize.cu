// RMSNorm (Zhang, Sennrich 2019) and LayerNorm (Ba, Kiros, Hinton 2016), one CTA per row.
//
//   load weight and bias                      // before the wait: no kernel writes them
//   wait for predecessor kernels
//   load the row into registers
//   mean = LayerNorm ? sum(x) / cols : 0
//   variance = sum((x - mean)^2) / cols       // in a second pass: exact also for large means
//   out = (x - mean) / sqrt(variance + eps) * weight + bias

#include "common.cuh"
#include "cta_reduce.cuh"
#include "element.cuh"

constexpr int kMaxThreads = ROW_THREADS;
constexpr int kChunks = NORMALIZE_CHUNKS;  // of a thread, at most
// With one chunk a thread needs at most 32 registers: beside the largest CTA an SM has enough left
// for one with a ring.
constexpr int kCtasOfSm = kChunks == 1 ? 2 : 1;

struct NormalizeArgs {
  const Element* x;       // [n, cols], rows x_stride apart
  const Element* weight;  // [cols], or null
  const Element* bias;    // [cols], or null
  Element* out;           // [n, cols], rows out_stride apart
  int rows;               // n; CTAs past them are idle (fill_sm)
  int cols;               // a multiple of 8, at most 8 * kChunks * kMaxThreads
  int centered;           // 1: LayerNorm, 0: RMSNorm
  float eps;
  int64_t x_stride, out_stride;
};

// Two elements in a register. Through __nv_bfloat16 they would take more registers.
__device__ __forceinline__ float2 floats(uint32_t both) {
#if BFLOAT16
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
#else
  return unpacked(both);
#endif
}

// A thread's part of a row: chunks threadIdx.x, threadIdx.x + blockDim.x, ... within the row.
struct Part {
  struct __align__(16) Words {
    uint32_t of[4];
  } chunks[kChunks];

  template <class Function>
  static __device__ __forceinline__ void for_each(const NormalizeArgs& args, Function function) {
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      const int number = threadIdx.x + i * blockDim.x;
      if (number < args.cols / 8) function(i, number);
    }
  }
  __device__ __forceinline__ void load(const NormalizeArgs& args, const Element* row) {
    for_each(args,
             [&](int i, int number) { chunks[i] = reinterpret_cast<const Words*>(row)[number]; });
  }
  // Mean of `term` over the elements of the row; called by all threads of the CTA.
  template <class Term>
  __device__ __forceinline__ float mean(const NormalizeArgs& args, float (&parts)[kMaxWarps],
                                        Term term) const {
    float sum = 0.0f;
    for_each(args, [&](int i, int) {
#pragma unroll
      for (const uint32_t both : chunks[i].of) {
        const float2 x = floats(both);
        sum += term(x.x);
        sum += term(x.y);
      }
    });
    return reduce_cta(sum, parts, [](float a, float b) { return a + b; }) / args.cols;
  }
};

extern "C" __global__ void __launch_bounds__(kMaxThreads, kCtasOfSm)
    normalize(const __grid_constant__ NormalizeArgs args) {
  __shared__ float sums[kMaxWarps];
  __shared__ float squares[kMaxWarps];
  ptx::launch_dependents();
  if (blockIdx.x >= args.rows) return fill_sm();
  Part x, weight, bias;
  if (args.weight) weight.load(args, args.weight);
  if (args.bias) bias.load(args, args.bias);
  ptx::wait_for_dependencies();
  x.load(args, args.x + blockIdx.x * args.x_stride);
  float mean = 0.0f;
  if (args.centered) mean = x.mean(args, sums, [](float value) { return value; });
  const float variance =
      x.mean(args, squares, [=](float value) { return (value - mean) * (value - mean); });
  const float scale = rsqrtf(variance + args.eps);
  Part::for_each(args, [&](int i, int number) {
    Part::Words result;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 in = floats(x.chunks[i].of[j]);
      float2 y = {(in.x - mean) * scale, (in.y - mean) * scale};
      if (!args.centered) y = floats(packed(y.x, y.y));
      if (args.weight) {
        const float2 w = floats(weight.chunks[i].of[j]);
        y.x *= w.x, y.y *= w.y;
      }
      if (args.bias) {
        const float2 b = floats(bias.chunks[i].of[j]);
        y.x += b.x, y.y += b.y;
      }
      result.of[j] = packed(y.x, y.y);
    }
    reinterpret_cast<Part::Words*>(args.out + blockIdx.x * args.out_stride)[number] = result;
  });
}
