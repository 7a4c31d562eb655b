// How the tiled GEMM's sums become outputs: bias, activation, residual.
//
// A thread has sums of one row of W, and rows of X, but Y's rows follow W's: so outputs pass, some
// rows of Y at a time, through shared memory, where a row is 128 bytes of 16-byte chunks, of 8
// outputs each, chunk c of row r at c ^ (r % 8).
#pragma once

#include "tiled_gemm.cuh"

constexpr int kStagingBarrier = 1;  // and the next: each warpgroup's own
constexpr int kChunk = 8;           // outputs
constexpr int kRowChunks = kTileOctets;
constexpr int kRowBytes = 16 * kRowChunks;

struct Staging {
  const uint32_t address;
  const int barrier;

  __device__ __forceinline__ Staging(uint32_t first, int warpgroup)
      : address(first + warpgroup * kStagingBytes), barrier(kStagingBarrier + warpgroup) {}
  __device__ __forceinline__ uint32_t chunk(int row, int number) const {
    return address + row * kRowBytes + ((number ^ row % 8) << 4);
  }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(barrier, kWarpgroup); }
};

// The outputs of a warpgroup's rows of W and of X.
struct TileOutputs {
  const TiledGemmArgs& args;
  const Staging& staging;
  const int column, columns;  // of Y: the first one, and how many there are
  const int n;                // the first row
  float bias[2];              // of rows g of octets 2w and 2w + 1

  // `octets` of W exist from `octet` on.
  __device__ __forceinline__ TileOutputs(const TiledGemmArgs& args, const Staging& staging,
                                         int octet, int octets, int n)
      : args(args),
        staging(staging),
        column(octet * kOctetRows / gates()),
        columns(min(octets * kOctetRows, args.m - octet * kOctetRows) / gates()),
        n(n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = (octet + 2 * warp + i) * kOctetRows + lane / 4;
      bias[i] = args.bias && row < args.m ? to_float(args.bias[row]) : 0.0f;
    }
  }

  __device__ __forceinline__ void put(const Sums& sums) const {
#pragma unroll
    for (int pass = 0; pass < kXRows / kPassRows; pass++)
      put_rows<kPassRows / 8>(sums.tile[0] + 2 * pass * (kPassRows / 8), pass * kPassRows);
  }

  // Of tiles of 8 rows of X, from the one at `row` of the warpgroup's on.
  template <int tiles>
  __device__ __forceinline__ void put_rows(const float2* sums, int row) const {
    const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x) % kWarpgroup;
    const int first = n + row, rows = min(8 * tiles, args.n - first);
    if (rows <= 0) return;
    if (args.activation == kSiluMul) {
      stage_gated<tiles>(sums, thread);
    } else {
      if (args.residual) {
        move<false>(first, rows, thread);
        staging.sync();
      }
      stage<tiles>(sums, thread);
    }
    staging.sync();
    move<true>(first, rows, thread);
    staging.sync();
  }

 private:
  __device__ __forceinline__ int gates() const { return args.activation == kSiluMul ? 2 : 1; }

  // Four 8 x 8 matrices at a time: of two octets of W and 16 rows of X.
  template <int tiles>
  __device__ __forceinline__ void stage(const float2* sums, uint32_t thread) const {
    const uint32_t lane = thread % 32, warp = thread / 32;
    uint32_t at = staging.chunk(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < tiles; i += 2, at += 16 * kRowBytes) {
      uint32_t words[4];
      if (args.residual) ptx::ldmatrix_x4_trans(words, at);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 sum = sums[2 * i + j];
        sum.x += bias[j % 2], sum.y += bias[j % 2];
        if (args.activation == kRelu) sum = {fmaxf(sum.x, 0.0f), fmaxf(sum.y, 0.0f)};
        if (args.residual) {
          const float2 more = unpacked(words[j]);
          sum.x += more.x, sum.y += more.y;
        }
        words[j] = packed(sum);
      }
      ptx::stmatrix_x4_trans(at, words);
    }
  }

  // Rows of W are gates and what they multiply in turn. Of lanes that have a gate and its partner
  // one takes both for octet 2w, the other for 2w + 1. So a chunk has the outputs of two octets,
  // those of the first one at even places.
  template <int tiles>
  __device__ __forceinline__ void stage_gated(const float2* sums, uint32_t thread) const {
    const uint32_t lane = thread % 32, warp = thread / 32;
    const bool odd = lane / 4 % 2;
    uint32_t at = staging.chunk(lane, warp);
#pragma unroll
    for (int i = 0; i < tiles; i += 4, at += 32 * kRowBytes) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 low = sums[2 * (i + j)], high = sums[2 * (i + j) + 1];
        low.x += bias[0], low.y += bias[0], high.x += bias[1], high.y += bias[1];
        const float2 given = odd ? low : high, own = odd ? high : low;
        const float2 other = {__shfl_xor_sync(0xffffffff, given.x, 4),
                              __shfl_xor_sync(0xffffffff, given.y, 4)};
        const float2 gate = odd ? other : own, up = odd ? own : other;
        words[j] = packed({silu_mul(gate.x, up.x), silu_mul(gate.y, up.y)});
      }
      ptx::stmatrix_x4_trans(at, words);
    }
  }

  // Between shared memory and `rows` of Y, or of the residual into it, from `first` on.
  template <bool out>
  __device__ __forceinline__ void move(int first, int rows, uint32_t thread) const {
    const int chunks = kRowChunks / gates();
    const int number = thread % chunks, step = kWarpgroup / chunks;
    const int exist = columns - number * kChunk;
    // With kSiluMul half a chunk has an octet's outputs, and a tile may begin with the second half.
    const bool whole = exist >= kChunk && (args.width | column) % kChunk == 0;
    const bool halves = exist >= kChunk && (args.width | column) % (kChunk / 2) == 0;
    if (exist <= 0) return;
    const int64_t place = static_cast<int64_t>(first) * args.width + column + number * kChunk;
#pragma unroll 1
    for (int row = thread / chunks; row < rows; row += step) {
      const int64_t at = place + static_cast<int64_t>(row) * args.width;
      uint4* const shared =
          reinterpret_cast<uint4*>(smem + (staging.chunk(row, number) - ptx::smem_address(smem)));
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

  // Outputs 0, 4, 1, 5, 2, 6, 3, 7 of a chunk.
  static __device__ __forceinline__ uint4 in_order(uint4 words) {
    return {words.x & 0xffff | words.y << 16, words.z & 0xffff | words.w << 16,
            words.x >> 16 | words.y & 0xffff0000, words.z >> 16 | words.w & 0xffff0000};
  }
  static __device__ __forceinline__ uint32_t packed(float2 values) {
    Pair pair;
    convert(pair.first, values.x), convert(pair.second, values.y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float2 unpacked(uint32_t word) {
    const Pair pair = *reinterpret_cast<const Pair*>(&word);
    return {to_float(pair.first), to_float(pair.second)};
  }
};
