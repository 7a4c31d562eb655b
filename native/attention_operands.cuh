// What a launch brings with it: queries in registers, and the new token, appended to the cache.
#pragma once

#include "splitk_flash_attn.cuh"

// Rotates dimension `dim` of a head, less than half of them, and its partner half of them further
// to a position (RoPE, arXiv 2104.09864, halves as in Llama).
__device__ __forceinline__ void rotate(const float2* rotations, int dim, float& first,
                                       float& second) {
  const float2 turn = rotations[dim];
  const float before = first;
  first = before * turn.x - second * turn.y;
  second = second * turn.x + before * turn.y;
}

// Those of the new token of a slot, [HEAD_DIM / 2], or null.
__device__ __forceinline__ const float2* rotations_of(const SplitKFlashAttnArgs& args, int slot) {
  if (args.rotations == nullptr) return nullptr;
  return args.rotations + static_cast<int64_t>(args.lengths[slot]) * (HEAD_DIM / 2);
}

__device__ __forceinline__ uint32_t packed(float first, float second) {
  Pair pair;
  convert(pair.first, first), convert(pair.second, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Queries of a group as B operand: lane 4g + t has the dimensions 16 s + 2t, + 1 and 8 more of
// query head g of each tile of 8 heads.
struct Queries {
  uint32_t step[GROUP_TILES][kSteps][2];

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, int slot, int head) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const float2* const rotations = rotations_of(args, slot);
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      const int of = min(8 * tile + lane / 4, args.group - 1);  // behind the last: never stored
      const Element* const q =
          args.q + slot * args.stride + (static_cast<int64_t>(head) * args.group + of) * HEAD_DIM;
#pragma unroll
      for (int chunk = 0; chunk < kChunks / 2; chunk++) {
        const int dim = 8 * chunk + 2 * t;
        const Pair low = *reinterpret_cast<const Pair*>(q + dim);
        const Pair high = *reinterpret_cast<const Pair*>(q + dim + HEAD_DIM / 2);
        float2 first = {to_float(low.first), to_float(low.second)};
        float2 second = {to_float(high.first), to_float(high.second)};
        if (rotations) {
          rotate(rotations, dim, first.x, second.x);
          rotate(rotations, dim + 1, first.y, second.y);
        }
        const int partner = chunk + kChunks / 2;
        step[tile][chunk / 2][chunk % 2] = packed(first.x, first.y);
        step[tile][partner / 2][partner % 2] = packed(second.x, second.y);
      }
    }
  }
};

// The new token of a slot, which is the last of the last block of each of its heads. A lane has
// some of its dimensions, keys by the two that are rotated together.
struct NewToken {
  static constexpr int kPairs = (HEAD_DIM / 2 + 31) / 32, kValues = (HEAD_DIM + 31) / 32;

  uint8_t* cached;        // its first key in the cache
  int row;                // of the block
  uint32_t keys[kPairs];  // both
  Element values[kValues];

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, const Task& task) {
    const int position = args.lengths[task.slot];
    const int64_t number = static_cast<int64_t>(task.head) * args.slot_blocks + position / kBlock;
    row = position % kBlock;
    cached =
        reinterpret_cast<uint8_t*>(args.caches[task.slot]) + number * 2 * kHalfBytes + row * 16;
    const int64_t at = task.slot * args.stride + static_cast<int64_t>(task.head) * HEAD_DIM;
    const float2* const rotations = rotations_of(args, task.slot);
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const int dim = min(dimension(i), HEAD_DIM / 2 - 1);
      float first = to_float(args.k[at + dim]), second = to_float(args.k[at + dim + HEAD_DIM / 2]);
      if (rotations) rotate(rotations, dim, first, second);
      keys[i] = packed(first, second);
    }
#pragma unroll
    for (int i = 0; i < kValues; i++)
      values[i] = args.v[at + min(dimension(i), HEAD_DIM - 1)];
  }

  // Its keys into the stage and the cache.
  __device__ __forceinline__ void put_keys(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const Pair pair = *reinterpret_cast<const Pair*>(&keys[i]);
      const int dim = dimension(i);
      if (dim >= HEAD_DIM / 2) continue;
      put(stage, cached, dim, pair.first);
      put(stage, cached, dim + HEAD_DIM / 2, pair.second);
    }
    __syncwarp();
  }

  // Its values, and zeros behind them in their tile: a weight of zero times what happens to lie
  // there need not be zero.
  __device__ __forceinline__ void put_values(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kValues; i++) {
      if (dimension(i) < HEAD_DIM) put(stage, cached + kHalfBytes, dimension(i), values[i]);
    }
    const int lane = threadIdx.x % 32;
    if (lane < kChunks) {
      auto* const rows = reinterpret_cast<float4*>(stage + lane * kChunkBytes);
      for (int behind = row + 1; behind % kTileRows; behind++)
        rows[behind] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static int dimension(int number) {
    return threadIdx.x % 32 + 32 * number;
  }
  __device__ __forceinline__ void put(uint8_t* stage, uint8_t* position, int dim,
                                      Element value) const {
    const int offset = dim / 8 * kChunkBytes + dim % 8 * 2;
    *reinterpret_cast<Element*>(stage + row * 16 + offset) = value;
    *reinterpret_cast<Element*>(position + offset) = value;
  }
};
