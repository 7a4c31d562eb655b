// Operands of a launch: queries in registers, and the new token, which is appended to the cache.
#pragma once

#include "attention_producer.cuh"
#include "rope.cuh"

// Cosines and sines of a position, [HEAD_DIM / 2]; null without RoPE.
__device__ __forceinline__ const float2* rotations_of(const SplitKFlashAttnArgs& args,
                                                      int position) {
  if (args.rotations == nullptr) return nullptr;
  return args.rotations + static_cast<int64_t>(position) * (HEAD_DIM / 2);
}

// Queries of a group as B operand: of query head g of each tile of 8 heads, lane 4g + t has the
// dimensions 16 s + 2t, + 1, + 8 and + 9 of every step s.
struct Queries {
  uint32_t step[GROUP_TILES][kSteps][2];

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, int slot, int head) {
    const int lane = opaque_lane(), t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      const int of = min(8 * tile + lane / 4,
                         args.group - 1);  // heads past the last are computed, never stored
      const Element* const q =
          args.q + slot * args.stride + (static_cast<int64_t>(head) * args.group + of) * HEAD_DIM;
#pragma unroll
      for (int vector = 0; vector < kVectors; vector++)
        step[tile][vector / 2][vector % 2] =
            *reinterpret_cast<const uint32_t*>(q + 8 * vector + 2 * t);
    }
  }

  // RMSNorm of each head with `weight`, [HEAD_DIM]: rounded before it is multiplied. A head is in
  // the four lanes of equal lane / 4.
  __device__ __forceinline__ void normalize(const Element* weight, float eps) {
    const int t = opaque_lane() % 4;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; tile++) {
      float sum = 0.0f;
#pragma unroll
      for (int vector = 0; vector < kVectors; vector++) {
        const float2 x = unpacked(step[tile][vector / 2][vector % 2]);
        sum += x.x * x.x + x.y * x.y;
      }
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const float scale = rsqrtf(sum / HEAD_DIM + eps);
#pragma unroll
      for (int vector = 0; vector < kVectors; vector++) {
        uint32_t& both = step[tile][vector / 2][vector % 2];
        float2 x = unpacked(both);
        x = unpacked(packed(scale * x.x, scale * x.y));
        const float2 w =
            unpacked(*reinterpret_cast<const uint32_t*>(weight + 8 * vector + 2 * t));
        both = packed(x.x * w.x, x.y * w.y);
      }
    }
  }

  __device__ __forceinline__ void apply_rope(const float2* rotations) {
    const int t = ptx::opaque<uint32_t>(threadIdx.x) % 4;
#pragma unroll
    for (int vector = 0; vector < kVectors / 2; vector++) {
      const int dim = 8 * vector + 2 * t, partner = vector + kVectors / 2;
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; tile++) {
        uint32_t& top = step[tile][vector / 2][vector % 2];
        uint32_t& bottom = step[tile][partner / 2][partner % 2];
        float2 first = unpacked(top), second = unpacked(bottom);
        rotate(rotations, dim, first.x, second.x);
        rotate(rotations, dim + 1, first.y, second.y);
        top = packed(first.x, first.y), bottom = packed(second.x, second.y);
      }
    }
  }
};

// Key and value of a slot's new token, the last position of the last block of each KV head. A lane
// has some of the dimensions; of the key, pairs that RoPE rotates together.
struct NewToken {
  static constexpr int kPairs = (HEAD_DIM / 2 + 31) / 32, kValues = (HEAD_DIM + 31) / 32;

  uint8_t* cached;  // the key's row in the cache
  int row;          // position in the block
  Pair keys[kPairs];
  Element values[kValues];

  __device__ __forceinline__ void load(const SplitKFlashAttnArgs& args, const Task& task,
                                       int position) {
    row = position % kBlock;
    const uint64_t block = entries_of(args, table_of(args, task.slot))[position / kBlock];
    cached = reinterpret_cast<uint8_t*>(block + head_offset(args, task.head)) + row * kRowBytes;
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

  // RMSNorm of the key with `weight`, [HEAD_DIM]: rounded before it is multiplied.
  __device__ __forceinline__ void normalize_key(const Element* weight, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const float first = to_float(keys[i].first), second = to_float(keys[i].second);
      if (dimension(i) < HEAD_DIM / 2) sum += first * first + second * second;
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    const float scale = rsqrtf(sum / HEAD_DIM + eps);
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const Element* const at = weight + min(dimension(i), HEAD_DIM / 2 - 1);
      Pair& pair = keys[i];
      convert(pair.first, scale * to_float(pair.first));
      convert(pair.second, scale * to_float(pair.second));
      convert(pair.first, to_float(pair.first) * to_float(at[0]));
      convert(pair.second, to_float(pair.second) * to_float(at[HEAD_DIM / 2]));
    }
  }

  __device__ __forceinline__ void apply_rope(const float2* rotations) {
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      float first = to_float(keys[i].first), second = to_float(keys[i].second);
      rotate(rotations, min(dimension(i), HEAD_DIM / 2 - 1), first, second);
      convert(keys[i].first, first), convert(keys[i].second, second);
    }
  }

  // Write the key to the stage and the cache.
  __device__ __forceinline__ void append_key(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const int dim = dimension(i);
      if (dim >= HEAD_DIM / 2) continue;
      put(stage, cached, dim, keys[i].first);
      put(stage, cached, dim + HEAD_DIM / 2, keys[i].second);
    }
    sync_warp();
  }

  // Write the value to the stage and the cache. Zero the rest of its tile in the stage, where
  // unwritten memory may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void append_value(uint8_t* stage) const {
#pragma unroll
    for (int i = 0; i < kValues; i++) {
      if (dimension(i) < HEAD_DIM) put(stage, cached + kHalfBytes, dimension(i), values[i]);
    }
    const int end = (row / kTileRows + 1) * kTileRows * kRowBytes;
    const int lane = opaque_lane();
#pragma unroll 1
    for (int at = (row + 1) * kRowBytes + lane * 16; at < end; at += 32 * 16)
      *reinterpret_cast<float4*>(stage + at) = {0.0f, 0.0f, 0.0f, 0.0f};
    sync_warp();
  }

 private:
  __device__ __forceinline__ static int dimension(int number) {
    return opaque_lane() + 32 * number;
  }
  __device__ __forceinline__ void put(uint8_t* stage, uint8_t* position, int dim,
                                      Element value) const {
    const int offset = (dim / 8 ^ swizzle_of(row)) * 16 + dim % 8 * 2;
    *reinterpret_cast<Element*>(stage + row * kRowBytes + offset) = value;
    *reinterpret_cast<Element*>(position + offset) = value;
  }
};
