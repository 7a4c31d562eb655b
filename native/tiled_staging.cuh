// Outputs of the tiled GEMM on their way through shared memory: a thread has sums of a few of Y's
// columns and rows, and memory is written by lines.
//
// Some rows of Y go at a time, in rows of 128 bytes: of 16-byte chunks, of 8 outputs each, chunk c
// of row r at c ^ (r % 8).
#pragma once

#include "tiled_gemm.cuh"

constexpr int kStagingBarrier = 1;  // and the next: each warpgroup's own
constexpr int kChunk = 8;           // outputs
constexpr int kRowChunks = 8;
constexpr int kRowBytes = 16 * kRowChunks;

// What a warpgroup stages: rows and columns of Y, as many as there are.
struct OutputBlock {
  int row, rows, column, columns;
};

struct Staging {
  const uint32_t address;
  const int barrier;

  __device__ __forceinline__ Staging(uint32_t first, int warpgroup)
      : address(first + warpgroup * kStagingBytes), barrier(kStagingBarrier + warpgroup) {}
  __device__ __forceinline__ uint32_t chunk(int row, int number) const {
    return address + row * kRowBytes + ((number ^ row % 8) << 4);
  }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(barrier, kWarpgroup); }

  // Between shared memory, where a row has so many chunks, and Y, or from the residual.
  template <bool out>
  __device__ __forceinline__ void move(const TiledGemmArgs& args, const OutputBlock& block,
                                       int chunks, uint32_t thread) const {
    const int number = thread % chunks, step = kWarpgroup / chunks;
    const int exist = block.columns - number * kChunk;
    // With kSiluMul half a chunk has an octet's outputs, and a tile may begin with the second half.
    const bool whole = exist >= kChunk && (args.width | block.column) % kChunk == 0;
    const bool halves = exist >= kChunk && (args.width | block.column) % (kChunk / 2) == 0;
    if (exist <= 0) return;
    const int64_t place =
        static_cast<int64_t>(block.row) * args.width + block.column + number * kChunk;
#pragma unroll 1
    for (int row = thread / chunks; row < block.rows; row += step) {
      const int64_t at = place + static_cast<int64_t>(row) * args.width;
      uint4* const shared =
          reinterpret_cast<uint4*>(smem + (chunk(row, number) - ptx::smem_address(smem)));
      if (out) {
        uint4 words = *shared;
        if (args.activation == kSiluMul) words = in_order(words);
        if (whole) {
          *reinterpret_cast<uint4*>(args.y + at) = words;
          continue;
        }
        if (halves) {
          *reinterpret_cast<uint2*>(args.y + at) = {words.x, words.y};
          *reinterpret_cast<uint2*>(args.y + at + kChunk / 2) = {words.z, words.w};
          continue;
        }
        const Chunk chunk = *reinterpret_cast<const Chunk*>(&words);
#pragma unroll
        for (int i = 0; i < kChunk; i++)
          if (i < exist) args.y[at + i] = chunk.of[i];
      } else if (whole) {
        *shared = *reinterpret_cast<const uint4*>(args.residual + at);
      } else {
#pragma unroll 1
        for (int i = 0; i < min(kChunk, exist); i++)
          reinterpret_cast<Element*>(shared)[i] = args.residual[at + i];
      }
    }
  }

 private:
  // A chunk of gated outputs has those of an octet at even places, and of the next one at odd ones:
  // single outputs, or with WIDE two at a time.
  static __device__ __forceinline__ uint4 in_order(uint4 words) {
    if (WIDE) return {words.x, words.z, words.y, words.w};
    return {words.x & 0xffff | words.y << 16, words.z & 0xffff | words.w << 16,
            words.x >> 16 | words.y & 0xffff0000, words.z >> 16 | words.w & 0xffff0000};
  }
};

__device__ __forceinline__ int gates(const TiledGemmArgs& args) {
  return args.activation == kSiluMul ? 2 : 1;
}

// What becomes of a sum and the one beside it, without a gate.
__device__ __forceinline__ uint32_t output(const TiledGemmArgs& args, float2 sum, float2 bias,
                                           uint32_t residual) {
  sum.x += bias.x, sum.y += bias.y;
  if (args.activation == kRelu) sum = {fmaxf(sum.x, 0.0f), fmaxf(sum.y, 0.0f)};
  if (args.residual) {
    const float2 more = unpacked(residual);
    sum.x += more.x, sum.y += more.y;
  }
  return packed(sum.x, sum.y);
}
