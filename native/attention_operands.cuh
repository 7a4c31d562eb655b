// What a launch brings with it: queries in registers, and the new token, appended to the cache.
#pragma once

#include "attention_producer.cuh"

// Rotates dimension `dim` of a head, less than half of them, and its partner half of them further
// to a position (RoPE, arXiv 2104.09864, halves as in Llama).
__device__ __forceinline__ void rotate(const float2* rotations, int dim, float& first,
                                       float& second) {
  const float2 turn = rotations[dim];
  const float before = first;
  first = before * turn.x - second * turn.y;
  second = second * turn.x + before * turn.y;
}

// Those of a position, [HEAD_DIM / 2], or null.
__device__ __forceinline__ const float2* rotations_of(const SplitKFlashAttnArgs& args,
                                                      int position) {
  if (args.rotations == nullptr) return nullptr;
  return args.rotations + static_cast<int64_t>(position) * (HEAD_DIM / 2);
}

// Queries of a group as B operand: lane 4g + t has the dimensions 16 s + 2t, + 1 and 8 more of
// query head g of each tile of 8 heads.
struct Queries {
  uint32_t step[GROUP_TILES][kSteps][2];

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, int slot, int head) {
    const int lane = lane_anew(), t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      const int of = min(8 * tile + lane / 4, args.group - 1);  // behind the last: never stored
      const Element* const q =
          args.q + slot * args.stride + (static_cast<int64_t>(head) * args.group + of) * HEAD_DIM;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk++)
        step[tile][chunk / 2][chunk % 2] =
            *reinterpret_cast<const uint32_t*>(q + 8 * chunk + 2 * t);
    }
  }

  __device__ __forceinline__ void turn(const float2* rotations) {
    const int t = ptx::anew<uint32_t>(threadIdx.x) % 4;
#pragma unroll
    for (int chunk = 0; chunk < kChunks / 2; chunk++) {
      const int dim = 8 * chunk + 2 * t, partner = chunk + kChunks / 2;
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; tile++) {
        uint32_t& low = step[tile][chunk / 2][chunk % 2];
        uint32_t& high = step[tile][partner / 2][partner % 2];
        float2 first = unpacked(low), second = unpacked(high);
        rotate(rotations, dim, first.x, second.x);
        rotate(rotations, dim + 1, first.y, second.y);
        low = packed(first.x, first.y), high = packed(second.x, second.y);
      }
    }
  }
};

// The new token of a slot, which is the last of the last block of each of its heads. A lane has
// some of its dimensions, keys by the two that are rotated together.
struct NewToken {
  static constexpr int kPairs = (HEAD_DIM / 2 + 31) / 32, kValues = (HEAD_DIM + 31) / 32;

  uint8_t* cached;  // its first key in the cache
  int row;          // of the block
  Pair keys[kPairs];
  Element values[kValues];

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, const Task& task,
                                       int position) {
    const int64_t number = static_cast<int64_t>(task.head) * args.slot_blocks + position / kBlock;
    row = position % kBlock;
    cached = reinterpret_cast<uint8_t*>(args.caches[task.slot]) + number * 2 * kHalfBytes +
             row * kRowBytes;
    const int64_t at = task.slot * args.stride + static_cast<int64_t>(task.head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const int dim = min(dimension(i), HEAD_DIM / 2 - 1);
      keys[i].first = args.k[at + dim], keys[i].second = args.k[at + dim + HEAD_DIM / 2];
    }
#pragma unroll
    for (int i = 0; i < kValues; i++)
      values[i] = args.v[at + min(dimension(i), HEAD_DIM - 1)];
  }

  __device__ __forceinline__ void turn(const float2* rotations) {
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      float first = to_float(keys[i].first), second = to_float(keys[i].second);
      rotate(rotations, min(dimension(i), HEAD_DIM / 2 - 1), first, second);
      convert(keys[i].first, first), convert(keys[i].second, second);
    }
  }

  // Its keys into the stage and the cache.
  __device__ __forceinline__ void put_keys(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const int dim = dimension(i);
      if (dim >= HEAD_DIM / 2) continue;
      put(stage, cached, dim, keys[i].first);
      put(stage, cached, dim + HEAD_DIM / 2, keys[i].second);
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
    const int end = (row / kTileRows + 1) * kTileRows * kRowBytes;
    const int lane = lane_anew();
#pragma unroll 1
    for (int at = (row + 1) * kRowBytes + lane * 16; at < end; at += 32 * 16)
      *reinterpret_cast<float4*>(stage + at) = {0.0f, 0.0f, 0.0f, 0.0f};
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static int dimension(int number) { return lane_anew() + 32 * number; }
  __device__ __forceinline__ void put(uint8_t* stage, uint8_t* position, int dim,
                                      Element value) const {
    const int offset = (dim / 8 ^ swizzle_of(row)) * 16 + dim % 8 * 2;
    *reinterpret_cast<Element*>(stage + row * kRowBytes + offset) = value;
    *reinterpret_cast<Element*>(position + offset) = value;
  }
};
