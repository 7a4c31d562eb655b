// The epilogues of the grouped SplitK_GEMM: gates times ups, the sum over a token's experts, or the
// products.
#pragma once

#include "grouped_splitk.cuh"

constexpr int kPairsOfThread = 2 * TILES;  // of accumulators: exchange() says which

// The outputs of a warp: two row blocks, `row_block` of the expert and the next one, of which
// `row_blocks` exist, for the rows of X of an item. Tokens and weights of the item's pairs are loaded
// before the products where registers allow, to hide their latency.
struct Outputs {
  static constexpr bool kEarly = kAdds && TILES <= 2 && !kHasUnits;
  // Products of a token that are loaded together: of so many experts, in so many row blocks.
  static constexpr int kAtOnce = 8, kBlocks = kEarly ? 2 : 1;

  const GroupedSplitKArgs& args;
  const int row_block, row_blocks;
  const int pair, pairs;  // of the item
  int tokens[kEarly ? TILES : 1];
  float weights[kEarly ? TILES : 1];

  __device__ __forceinline__ Outputs(const GroupedSplitKArgs& args, const Items& of, int first,
                                     int row_blocks)
      : args(args),
        row_block(of.row_block + first),
        row_blocks(row_blocks),
        pair(of.pair),
        pairs(of.pairs) {
#pragma unroll
    for (int i = 0; kEarly && i < TILES; i++)
      tokens[i] = args.tokens[number(2 * i)], weights[i] = args.weights[number(2 * i)];
  }

  // silu(gate) * up: even rows of W are gates, odd rows ups.
  __device__ __forceinline__ void store_gated(const Accumulators& acc) const {
    float2 sums[kPairsOfThread];
    exchange(acc, sums);
    const int m = args.expert_row_blocks * kRowsPerBlock;
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++) {
      if (!exists(i)) continue;
      const int64_t row = pair + x_row(i);
      convert(args.y[row * (m / 2) + w_row(i) / 2], silu_mul(sums[i].x, sums[i].y));
    }
  }

  // Stores products as they are.
  __device__ __forceinline__ void store(const Accumulators& acc) const {
    float2 products[kPairsOfThread];
    exchange(acc, products);
    const int m = args.expert_row_blocks * kRowsPerBlock;
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++) {
      if (!exists(i)) continue;
      const int64_t row = pair + x_row(i);
      *reinterpret_cast<uint32_t*>(args.y + row * m + w_row(i)) =
          packed(products[i].x, products[i].y);
    }
  }

  // Stores products, times the weights of their experts. The warp that stores the last products of
  // a token's 8 outputs adds all of them up, expert by expert, and adds them to y.
  __device__ __forceinline__ void add(const Accumulators& acc) const {
    float2 products[kPairsOfThread];
    exchange(acc, products);
    const int m = args.expert_row_blocks * kRowsPerBlock, leader = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++) {
      if (!exists(i)) continue;
      const int64_t row = pair + x_row(i);
      const float weight = kEarly ? weights[i / 2] : args.weights[row];
      *reinterpret_cast<float2*>(args.partials + row * m + w_row(i)) = {weight * products[i].x,
                                                                        weight * products[i].y};
    }
    // Four lanes have the outputs of a token in a row block. One of them counts arrivals: their
    // stores are ordered before its own. The last one resets the count.
    __syncwarp();
    const bool counts = threadIdx.x % 32 < 8;
    int before[kPairsOfThread];
    if (counts) ptx::fence_acq_rel();
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++)
      before[i] = counts && exists(i) ? atomicAdd(arrivals(i), 1) : -1;
    if (counts) ptx::fence_acq_rel();
    uint32_t complete = 0;  // bit i: all experts of the token have arrived
#pragma unroll
    for (int i = 0; i < kPairsOfThread; i++) {
      if (before[i] == args.top_k - 1) *arrivals(i) = 0;
      const bool last = __shfl_sync(0xffffffff, before[i], leader) == args.top_k - 1;
      complete |= static_cast<uint32_t>(last) << i;
    }
    __syncwarp();
    // Unrolled where tokens are in registers, which are few; else it takes too many registers.
#pragma unroll(kEarly ? TILES : 1)
    for (int i = 0; i < kPairsOfThread; i += kBlocks) {
      const uint32_t blocks = complete >> i & ((1 << kBlocks) - 1);
      if (blocks) add_up(token(i), w_row(i), blocks, m);
    }
  }

 private:
  __device__ __forceinline__ int w_row(int i) const {
    return (row_block + i % 2) * kRowsPerBlock + threadIdx.x % 32 / 8 * 2;
  }
  // Counted in the item.
  __device__ __forceinline__ int x_row(int i) const {
    return i / 2 * 8 + threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2;
  }
  __device__ __forceinline__ bool exists(int i) const {
    return i % 2 < row_blocks && x_row(i) < pairs;
  }
  // A pair's number; the last one's for rows of X behind it.
  __device__ __forceinline__ int number(int i) const { return pair + min(x_row(i), pairs - 1); }
  __device__ __forceinline__ int token(int i) const {
    return kEarly ? tokens[i / 2] : args.tokens[number(i)];
  }
  // Counter of the experts that have arrived for a token's 8 outputs.
  __device__ __forceinline__ int* arrivals(int i) const {
    return args.arrivals + static_cast<int64_t>(token(i)) * args.expert_row_blocks + row_block +
           i % 2;
  }
  // Adds the products of a token's experts to two of its outputs in each row block whose bit of
  // `blocks` is set; `row` is in the first.
  __device__ __forceinline__ void add_up(int token, int row, uint32_t blocks, int m) const {
    const int* const own = args.pairs + static_cast<int64_t>(token) * args.top_k;
    Element* const y = args.y + static_cast<int64_t>(token) * m + row;
    uint32_t* outputs[kBlocks];
    float2 residuals[kBlocks], sums[kBlocks] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      outputs[block] = reinterpret_cast<uint32_t*>(y + block * kRowsPerBlock);
      if (blocks >> block & 1) residuals[block] = unpacked(*outputs[block]);
    }
#pragma unroll 1
    for (int i = 0; i < args.top_k; i += kAtOnce) {
      // All loads are in flight together: memory is idle while a launch ends.
      int pairs[kAtOnce];
      float2 more[kAtOnce][kBlocks];
#pragma unroll
      for (int j = 0; j < kAtOnce; j++)
        pairs[j] = i + j < args.top_k ? own[i + j] : 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        // From L2: this SM's L1 knows nothing of the other CTAs' stores.
        const float* const of_pair = args.partials + static_cast<int64_t>(pairs[j]) * m + row;
#pragma unroll
        for (int block = 0; block < kBlocks; block++) {
          const float* const from = of_pair + block * kRowsPerBlock;
          more[j][block] = ptx::load_from_l2_or_zero(reinterpret_cast<const float2*>(from),
                                                     i + j < args.top_k && blocks >> block & 1);
        }
      }
#pragma unroll
      for (const float2(&of_pair)[kBlocks] : more) {
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
          sums[block].x += of_pair[block].x, sums[block].y += of_pair[block].y;
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      const float2 &residual = residuals[block], &sum = sums[block];
      if (blocks >> block & 1)
        *outputs[block] = packed(residual.x + sum.x, residual.y + sum.y);
    }
  }
};
