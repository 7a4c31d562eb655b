// Rows by expert, for the grouped tiled GEMM, and back.
//
//   permute: x [n, cols] -> out [pairs, cols], a copy of each row for each of its experts
//   combine: products [pairs, cols] -> out [n, cols] = residual + the weighted sum of a row's pairs
//
// A thread has a chunk of 8 columns of a row. The sum is float32, in the order of the row's pairs,
// which is that of experts; it does not depend on other rows.

#include "common.cuh"
#include "element.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS;

struct PermuteArgs {
  const Element* x;   // [n, cols]
  const int* pairs;  // [n, top_k]: pairs of a row; -1 in rows without a request
  Element* out;       // [pairs, cols]
  int cols, top_k;
  int row_ctas;  // CTAs of a row
};

struct CombineArgs {
  const Element* products;  // [pairs, cols]
  const int* pairs;        // [n, top_k]
  const float* weights;     // [pairs]
  const Element* residual;  // [n, cols]
  Element* out;             // [n, cols], may be the residual
  int cols, top_k;
  int row_ctas;
};

// The thread's row, and its chunk of that row, which may lie behind the last one.
struct RowChunk {
  const int row, chunk, chunks;
  const int* const pairs;

  template <class Args>
  __device__ __forceinline__ explicit RowChunk(const Args& args)
      : row(blockIdx.x / args.row_ctas),
        chunk(blockIdx.x % args.row_ctas * kThreads + threadIdx.x),
        chunks(args.cols / 8),
        pairs(args.pairs + row * args.top_k) {}

  __device__ __forceinline__ bool exists() const { return chunk < chunks; }
  // Number of the same chunk in row `number` of a matrix with as many columns.
  __device__ __forceinline__ int64_t in_row(int number) const {
    return static_cast<int64_t>(number) * chunks + chunk;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    permute(const __grid_constant__ PermuteArgs args) {
  ptx::wait_for_dependencies();
  ptx::launch_dependents();  // not before: the next launch may read what the router has listed
  const RowChunk at(args);
  if (!at.exists()) return;
  const Chunk x = reinterpret_cast<const Chunk*>(args.x)[at.in_row(at.row)];
#pragma unroll 4
  for (int i = 0; i < args.top_k; i++) {
    const int pair = at.pairs[i];
    if (pair >= 0) reinterpret_cast<Chunk*>(args.out)[at.in_row(pair)] = x;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    combine(const __grid_constant__ CombineArgs args) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const RowChunk at(args);
  if (!at.exists()) return;
  float sums[8] = {};
#pragma unroll 4
  for (int i = 0; i < args.top_k; i++) {
    const int pair = at.pairs[i];
    if (pair < 0) break;
    const float weight = args.weights[pair];
    const Chunk product = reinterpret_cast<const Chunk*>(args.products)[at.in_row(pair)];
#pragma unroll
    for (int j = 0; j < 8; j++)
      sums[j] += weight * to_float(product.of[j]);
  }
  const Chunk residual = reinterpret_cast<const Chunk*>(args.residual)[at.in_row(at.row)];
  Chunk out;
#pragma unroll
  for (int j = 0; j < 8; j++)
    convert(out.of[j], to_float(residual.of[j]) + sums[j]);
  reinterpret_cast<Chunk*>(args.out)[at.in_row(at.row)] = out;
}
