// Embedding of a step's tokens from a packed table in several memory tiers, plus learned positions.
//
//   for each (row of out, 16-byte chunk of it), one thread each:
//     wait for predecessor kernels, which write the tokens
//     out = table[token], read from the tier of its row block
//     out += positions[length + offset]   // models with learned positions

#include "element.cuh"
#include "packed.cuh"
#include "units.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS;

struct EmbedArgs {
  const int* tokens;         // [n]
  const int* lengths;        // [n], negative in rows without a request; unused without positions
  const Element* positions;  // [position_count, cols], or null
  Element* out;              // [n, cols]
  int rows, cols;            // of the table; cols is a multiple of 8
  int position_count, offset;
  int row_ctas;        // CTAs per row of `out`
  PackedMatrix table;  // [rows, cols]
};

// Columns 8 * number to 8 * number + 7 of a row of a row block.
__device__ __forceinline__ uint4 chunk(const RowBlock& row_block, int row, int number) {
#if CODE
  constexpr int kUnitChunks = kUnitAtoms * kAtomChunks;
  const uint8_t* const unit = row_block.atom(number / kUnitChunks * kUnitAtoms);
  return chunk_of_unit(unit, row, number % kUnitChunks);
#else
  return *reinterpret_cast<const uint4*>(row_block.chunk(row, number));
#endif
}

// `row` clamped to a table of `count` rows.
__device__ __forceinline__ int clamped(int row, int count) {
  return min(max(row, 0), count - 1);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    embed(const __grid_constant__ EmbedArgs args) {
  ptx::launch_dependents();
  const int row = blockIdx.x / args.row_ctas;
  const int number = blockIdx.x % args.row_ctas * kThreads + threadIdx.x;
  ptx::wait_for_dependencies();
  if (number >= args.cols / 8) return;
  const auto chunk_of = [&](auto* matrix, int row) {
    return matrix + static_cast<int64_t>(row) * args.cols + 8 * number;
  };
  const int length = args.positions ? args.lengths[row] : 0;
  const int token = clamped(args.tokens[row], args.rows);
  Chunk position;
  if (args.positions) {
    const int at = clamped(max(length, 0) + args.offset, args.position_count);
    position = *reinterpret_cast<const Chunk*>(chunk_of(args.positions, at));
  }
  const RowBlock row_block(args.table, token / kRowsPerBlock);
  const uint4 words = chunk(row_block, token % kRowsPerBlock, number);
  Chunk sum = *reinterpret_cast<const Chunk*>(&words);
  if (args.positions) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      convert(sum.of[i], to_float(sum.of[i]) + to_float(position.of[i]));
  }
  *reinterpret_cast<Chunk*>(chunk_of(args.out, row)) = sum;
}
