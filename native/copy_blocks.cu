// Copy one layer of KV blocks that lie anywhere, such as in another tier, to one buffer.
//
//   for each (block, 16-byte vector of its layer), kVectorsAtOnce of them a thread:
//     wait for predecessor kernels, which may still read what is overwritten
//     to[block] = block's layer

#include "common.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS;
constexpr int kVectorsAtOnce = 4;  // so that enough bytes are in flight over a link

struct CopyBlocksArgs {
  const uint64_t* count;   // of blocks
  const uint64_t* blocks;  // [count]: addresses
  uint8_t* to;             // [count][bytes]
  int64_t layer_offset;    // from the address of a block to this layer's part of it
  int64_t bytes;           // of that part, a multiple of 16
  int ctas;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    copy_blocks(const __grid_constant__ CopyBlocksArgs args) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int64_t vectors = args.bytes / 16, all = static_cast<int64_t>(*args.count) * vectors;
  const int64_t step = static_cast<int64_t>(args.ctas) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < all;
       first += kVectorsAtOnce * step) {
    uint4 values[kVectorsAtOnce];
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; i++) {
      const int64_t at = first + i * step;
      if (at >= all) continue;
      const auto* const from =
          reinterpret_cast<const uint4*>(args.blocks[at / vectors] + args.layer_offset);
      values[i] = from[at % vectors];
    }
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; i++) {
      const int64_t at = first + i * step;
      if (at < all) reinterpret_cast<uint4*>(args.to)[at] = values[i];
    }
  }
}
