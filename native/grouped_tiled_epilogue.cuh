// The epilogue of tall tiles of the grouped tiled GEMM, without biases or residuals. Tensor cores
// idle meanwhile, so it is short: a warpgroup writes its outputs to shared memory as rows of Y, and
// then its threads store these rows, each warp whole pieces of 64 or 128 bytes. Blocks of a warp's own
// (tiled_staging.cuh) would make them pieces of 16 or 32 bytes.
#pragma once

#include "tiled_staging.cuh"

constexpr int kStagingBarrier = 13;  // and 14: a named barrier of each warpgroup

// Rows of a warpgroup's outputs in shared memory: of 64 rows of W, or of their 32 gated outputs.
template <bool gated>
struct StagedRows {
  static constexpr int kGates = gated ? 2 : 1;
  static constexpr int kChunks = kTileRowBlocks / kGates;
  static constexpr int kBytes = kChunks * 16;
  static constexpr int kOfPass = kPassTiles * 8;
  static constexpr int kStep = kWarpgroup / kChunks;  // rows that the warpgroup stores at a time
  static_assert(kStep % 8 == 0, "their chunks are swizzled alike");

  // Chunks are swizzled so that eight rows have different banks.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kBytes + ((chunk ^ row * kChunks / 8 % kChunks) << 4);
  }
};

struct TallEpilogue {
  const TiledGemmArgs& args;
  const WarpgroupTile& tile;
  const int warpgroup;

  __device__ __forceinline__ void store(const Accumulators& acc) const {
    if (args.activation == kSiluMul) return store<true>(acc);
    store<false>(acc);
  }

 private:
  // Stages and stores the outputs of as many passes at a time as there is room for.
  template <bool gated>
  __device__ __forceinline__ void store(const Accumulators& acc) const {
    using Rows = StagedRows<gated>;
    const int rows = tile.rows_end - tile.n, room = args.output_blocks * Rows::kGates;
    const int passes = (rows + Rows::kOfPass - 1) / Rows::kOfPass;
    const uint32_t staging =
        ptx::smem_address(smem) + warpgroup * args.output_blocks * (4 * kBlockBytes);
#pragma unroll 1
    for (int from = 0; from < passes; from += room) {
      const int end = min(from + room, passes);
      sync();  // all warps have read the rows that were there
      uint32_t at = staging + staged_at<gated>();
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) {
        if (pass < from || pass >= end) continue;
        stage<gated>(acc.tile[0] + 2 * pass * kPassTiles, at);
        at += Rows::kOfPass * Rows::kBytes;
      }
      sync();
      const int first = from * Rows::kOfPass;
      store_rows<gated>(staging, first, min(rows, end * Rows::kOfPass) - first);
    }
  }

  // The warps of the warpgroup wait for each other.
  __device__ __forceinline__ void sync() const {
    __syncwarp();
    ptx::named_barrier_sync(kStagingBarrier + warpgroup, kWarpgroup);
  }

  // Where the row begins whose address the lane gives to stmatrix.
  template <bool gated>
  static __device__ __forceinline__ uint32_t staged_at() {
    const uint32_t lane = opaque_lane(), warp = ptx::opaque<uint32_t>(threadIdx.x) / 32 % 4;
    if (gated) return StagedRows<true>::offset(lane, warp);
    return StagedRows<false>::offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  }

  // Writes a lane's outputs of a pass: `acc` are kPassTiles tiles of 8 rows of X.
  template <bool gated>
  __device__ __forceinline__ void stage(const float2* acc, uint32_t at) const {
    if (gated) {
      stage_gated(acc, at);
    } else {
      stage_plain(acc, at);
    }
  }

  // Four matrices at a time: two row blocks of W by 16 rows of X.
  __device__ __forceinline__ void stage_plain(const float2* acc, uint32_t at) const {
#pragma unroll
    for (int i = 0; i < kPassTiles; i += 2) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        words[j] = packed(acc[2 * i + j].x, acc[2 * i + j].y);
      if (args.activation == kRelu) {
#pragma unroll
        for (int j = 0; j < 4; j++)
          words[j] = ptx::max_nan(words[j], 0, Element());
      }
      ptx::stmatrix_x4_trans(at + i * 8 * StagedRows<false>::kBytes, words);
    }
  }

  // silu(gate) * up. Rows of W are gates and ups in turn, so that two lanes have a gate and its up:
  // the lane of the gates takes both for row block 2w, the other for 2w + 1. Thus outputs of both row
  // blocks alternate in a chunk; in_order() undoes that.
  __device__ __forceinline__ void stage_gated(const float2* acc, uint32_t at) const {
    const bool odd = threadIdx.x / 4 % 2;
    uint32_t words[kPassTiles];
#pragma unroll
    for (int i = 0; i < kPassTiles; i++) {
      const float2 first = acc[2 * i], second = acc[2 * i + 1];  // of row blocks 2w and 2w + 1
      const float2 given = odd ? first : second, own = odd ? second : first;
      const float2 other = {__shfl_xor_sync(0xffffffff, given.x, 4),
                            __shfl_xor_sync(0xffffffff, given.y, 4)};
      const float2 gate = odd ? other : own, up = odd ? own : other;
      words[i] = packed(gated(gate.x, up.x), gated(gate.y, up.y));
    }
    ptx::stmatrix_x4_trans(at, words);
  }

  // The bits of silu_mul() in fewer instructions: a subnormal power is zero here, but 1 plus it is
  // 1 either way.
  static __device__ __forceinline__ float gated(float gate, float up) {
    constexpr float kLog2E = 1.4426950216293335f;
    return __fdividef(gate, 1.0f + ptx::exp2(gate * -kLog2E)) * up;
  }

  // A chunk of gated outputs, those of its first row block first.
  static __device__ __forceinline__ uint4 in_order(const uint4& of) {
    const auto low = [](uint32_t a, uint32_t b) { return a & 0xffff | b << 16; };
    const auto high = [](uint32_t a, uint32_t b) { return a >> 16 | b & 0xffff0000; };
    return {low(of.x, of.y), low(of.z, of.w), high(of.x, of.y), high(of.z, of.w)};
  }

  // By all warps: stores `rows` staged rows to Y, from the tile's row `first` on.
  template <bool gated>
  __device__ __forceinline__ void store_rows(uint32_t staging, int first, int rows) const {
    using Rows = StagedRows<gated>;
    constexpr int kAtOnce = 2;
    const int thread = ptx::opaque<uint32_t>(threadIdx.x) % kWarpgroup;
    const int chunk = thread % Rows::kChunks, row_block = tile.row_block - tile.first_row_block;
    const int columns = tile.row_blocks * kRowsPerBlock / Rows::kGates - chunk * kChunk;
    const int column = row_block * kRowsPerBlock / Rows::kGates + chunk * kChunk;
    if (columns <= 0) return;
    // Gated outputs of a tile may end within a chunk, or begin at a multiple of 8 bytes.
    const bool whole = !gated || columns >= kChunk && (args.width | column) % kChunk == 0;
    int row = thread / Rows::kChunks;
    uint32_t at = staging + Rows::offset(row, chunk);
    Element* to = args.y + static_cast<int64_t>(tile.n + first + row) * args.width + column;
#pragma unroll 1
    for (; row < rows; row += kAtOnce * Rows::kStep) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
        if (row + i * Rows::kStep < rows)
          words[i] = ptx::load_chunk(at + i * Rows::kStep * Rows::kBytes);
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        if (row + i * Rows::kStep < rows) {
          const uint4 outputs = gated ? in_order(words[i]) : words[i];
          if (whole) {
            ptx::store_chunk(to, outputs);
          } else {
            reinterpret_cast<uint2*>(to)[0] = {outputs.x, outputs.y};
            if (columns >= kChunk) reinterpret_cast<uint2*>(to)[1] = {outputs.z, outputs.w};
          }
        }
        to += Rows::kStep * args.width;
      }
      at += kAtOnce * Rows::kStep * Rows::kBytes;
    }
  }
};
