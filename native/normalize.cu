// RMSNorm (Zhang, Sennrich 2019) and LayerNorm (Ba, Kiros, Hinton 2016) of rows, by a CTA each.
//
// A row stays in registers between its passes: LayerNorm's variance is of the distances to the
// mean, so that it loses nothing where the mean is large.

#include "common.cuh"
#include "cta_reduce.cuh"
#include "element.cuh"

constexpr int kMaxThreads = ROW_THREADS;
constexpr int kChunks = NORMALIZE_CHUNKS;  // at most, of a thread

struct NormalizeArgs {
  const Element* x;       // [n, cols]
  const Element* weight;  // [cols], or null
  const Element* bias;    // [cols], or null
  Element* out;           // [n, cols]
  int rows;               // n; further CTAs only fill SMs
  int cols;               // in eights, at most 8 * kChunks * kMaxThreads
  int centered;           // LayerNorm, or else RMSNorm
  float eps;
};

// A thread's part of a row: chunks as far apart as there are threads, the last ones maybe missing.
struct Part {
  Chunk chunks[kChunks];

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
             [&](int i, int number) { chunks[i] = reinterpret_cast<const Chunk*>(row)[number]; });
  }
  // Of all the row's elements, `term` of each.
  template <class Term>
  __device__ __forceinline__ float mean(const NormalizeArgs& args, float (&parts)[kMaxWarps],
                                        Term term) const {
    float sum = 0.0f;
    for_each(args, [&](int i, int) {
#pragma unroll
      for (const Element& element : chunks[i].of)
        sum += term(to_float(element));
    });
    return reduce_cta(sum, parts, [](float a, float b) { return a + b; }) / args.cols;
  }
};

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    normalize(const __grid_constant__ NormalizeArgs args) {
  __shared__ float sums[kMaxWarps];
  __shared__ float squares[kMaxWarps];
  ptx::launch_dependents();
  if (blockIdx.x >= args.rows) return fill_sm();
  Part x, weight, bias;
  if (args.weight) weight.load(args, args.weight);
  if (args.bias) bias.load(args, args.bias);
  ptx::wait_for_dependencies();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * args.cols;
  x.load(args, args.x + first);
  float mean = 0.0f;
  if (args.centered) mean = x.mean(args, sums, [](float value) { return value; });
  const float variance =
      x.mean(args, squares, [=](float value) { return (value - mean) * (value - mean); });
  const float scale = rsqrtf(variance + args.eps);
  Part::for_each(args, [&](int i, int number) {
    Chunk result;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float value = (to_float(x.chunks[i].of[j]) - mean) * scale;
      if (!args.centered) convert(result.of[j], value), value = to_float(result.of[j]);
      if (args.weight) value *= to_float(weight.chunks[i].of[j]);
      if (args.bias) value += to_float(bias.chunks[i].of[j]);
      convert(result.of[j], value);
    }
    reinterpret_cast<Chunk*>(args.out + first)[number] = result;
  });
}
