// Outputs of the tiled GEMM on their way through shared memory: a thread has sums of a few of Y's
// columns and rows, and memory is written by pieces of rows.
//
// Every warp does so by itself, in blocks of its own: while TMA writes some to Y, it stages others,
// and goes on to the next tile. Residuals are brought to blocks as far ahead as there are any. What
// TMA cannot write the warp's lanes do.
#pragma once

#include "tiled_gemm.cuh"

constexpr int kPassTiles = TILED_PASS_TILES;  // of a warp's sums, whose outputs are a block
constexpr int kPasses = X_TILES / kPassTiles;
constexpr int kLeastBlocks = TILED_MIN_OUTPUT_BLOCKS;  // of a warp
constexpr int kRowChunks = WIDE ? kPassTiles : 2;
constexpr int kBlockRows = WIDE ? 16 : 8 * kPassTiles;
constexpr int kBlockBytes = kBlockRows * kRowChunks * 16;

// What becomes of sums on their way: nothing, or the residual is added, or one gates another. Each
// has code of its own, as short as it can be: between two tiles nothing is multiplied.
enum Way : int { kAsTheyAre, kWithResidual, kGated };

__device__ __forceinline__ Way way_of(const TiledGemmArgs& args) {
  return args.activation == kSiluMul ? kGated : args.residual ? kWithResidual : kAsTheyAre;
}

// The outputs of a lane's sums of a pass, without a gate: words of two, that lie as sums do. Their
// biases are bias(i).
template <Way way, class Bias>
__device__ __forceinline__ void outputs(const TiledGemmArgs& args, const float2* sums, Bias bias,
                                        uint32_t (&words)[2 * kPassTiles]) {
  float2 values[2 * kPassTiles];
#pragma unroll
  for (int i = 0; i < 2 * kPassTiles; i++)
    values[i] = sums[i];
  if (args.bias) {
#pragma unroll
    for (int i = 0; i < 2 * kPassTiles; i++)
      values[i].x += bias(i).x, values[i].y += bias(i).y;
  }
  if (args.activation == kRelu) {
#pragma unroll
    for (int i = 0; i < 2 * kPassTiles; i++)
      values[i] = {fmaxf(values[i].x, 0.0f), fmaxf(values[i].y, 0.0f)};
  }
#pragma unroll
  for (int i = 0; i < 2 * kPassTiles; i++) {
    if (way == kWithResidual) {
      const float2 more = unpacked(words[i]);
      values[i].x += more.x, values[i].y += more.y;
    }
    words[i] = packed(values[i].x, values[i].y);
  }
}

// What a warpgroup has of a tile: row blocks of W, and rows of X from n on.
struct TilePart {
  int row_block, row_blocks;  // there may be none
  int n;

  __device__ __forceinline__ TilePart(const TiledGemmArgs& args, const Tiles& tile, int warpgroup) {
    const bool along_w = args.tiers[tile.tier].row_groups == kWarpgroups;
    const int before = along_w ? warpgroup * kTileRowBlocks : 0;
    row_block = tile.row_block + before;
    row_blocks = max(0, min(kTileRowBlocks, tile.row_blocks - before));
    n = tile.n + (along_w ? 0 : warpgroup * kXRows);
    if (n >= args.n) row_blocks = 0;
  }
  __device__ __forceinline__ bool exists() const { return row_blocks > 0; }
};

// What of a row of a block the outputs take: with a gate there are half as many.
template <bool gated>
struct BlockRow {
  static constexpr int kGates = gated ? 2 : 1;
  static constexpr int kChunks = kRowChunks / kGates;
  static constexpr int kColumns = kChunks * kChunk;

  // Where a chunk is in a block. Rows are of 16, 32 or 64 bytes, and chunks are exchanged, so that
  // eight rows' have different banks: as a tensor map's swizzle of so many bytes does.
  static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return (row * kChunks + (chunk ^ row * kChunks / 8 % kChunks)) * 16;
  }
};

// The blocks of a warp, which it takes in turns.
struct Blocks {
  const int count;
  const uint32_t first;
  uint32_t next;

  __device__ __forceinline__ explicit Blocks(const TiledGemmArgs& args)
      : count(args.blocks),
        first(ptx::smem_address(smem) + threadIdx.x / 32 * count * kBlockBytes),
        next(first) {}

  __device__ __forceinline__ uint32_t after(uint32_t block) const {
    return block + kBlockBytes == first + count * kBlockBytes ? first : block + kBlockBytes;
  }
  __device__ __forceinline__ uint32_t take() {
    const uint32_t block = next;
    next = after(block);
    return block;
  }
};

// A warp's outputs of a tile, and how its lanes go between blocks and Y: each has one chunk, in one
// or two rows.
template <bool gated>
struct WarpOutputs {
  using Row = BlockRow<gated>;
  static constexpr int kStep = 32 / Row::kChunks;  // rows
  static constexpr int kCount = kBlockRows / kStep;
  // From one pass to the next there are other rows, or other columns.
  static constexpr int kPassRows = WIDE ? 0 : kBlockRows;
  static constexpr int kPassColumns = WIDE ? Row::kColumns : 0;

  const TiledGemmArgs& args;
  int row, rows;  // of Y: where the first pass begins, and how many there are
  int column, columns;

  __device__ __forceinline__ WarpOutputs(const TiledGemmArgs& args, const TilePart& part)
      : args(args) {
    const int warp = ptx::anew<uint32_t>(threadIdx.x) % kWarpgroup / 32;
    row = part.n + (WIDE ? warp * kBlockRows : 0);
    rows = args.n - row;
    column = (part.row_block * kRowsPerBlock + (WIDE ? 0 : warp * 2 * kRowsPerBlock)) / Row::kGates;
    const int end = (part.row_block + part.row_blocks) * kRowsPerBlock / Row::kGates;
    columns = min(end, args.width) - column;
    if (!WIDE) columns = min(columns, Row::kColumns);
  }

  // How many passes there are outputs for: the first ones.
  __device__ __forceinline__ int passes() const {
    if (rows <= 0 || columns <= 0) return 0;
    const int all =
        WIDE ? (columns + Row::kColumns - 1) / Row::kColumns : (rows + kBlockRows - 1) / kBlockRows;
    return min(kPasses, all);
  }

  // Whether TMA can write the blocks of so many passes: they are as large as any, or have all that
  // Y has there. What it writes has to begin at a multiple of 16 bytes, or the instruction is
  // illegal (H200): gated outputs of a tile that begins with an odd row block do not.
  __device__ __forceinline__ bool are_boxes(int passes) const {
    const int wanted = WIDE ? passes * Row::kColumns : Row::kColumns;
    return !gated && args.boxes && (columns >= wanted || column + columns == args.width);
  }

  // By one lane: begins to write a block to Y.
  __device__ __forceinline__ void write_box(uint32_t block, int pass) const {
    ptx::tensor_store(&args.y_boxes, column + pass * kPassColumns, row + pass * kPassRows, block);
  }

  // The same at once.
  __device__ __forceinline__ void write(uint32_t block, int pass) const {
    each(args.y, block, pass, [&](Element* to, uint32_t chunk, int count) {
      if (count == kChunk && (args.width | column) % kChunk == 0) {
        ptx::store_chunk(to, ptx::load_chunk(chunk));
      } else if (count == kChunk && (args.width | column) % (kChunk / 2) == 0) {
        // Gated, of a tile that begins with an odd row block.
        const uint4 words = ptx::load_chunk(chunk);
        reinterpret_cast<uint2*>(to)[0] = {words.x, words.y};
        reinterpret_cast<uint2*>(to)[1] = {words.z, words.w};
      } else {
#pragma unroll 1
        for (int i = 0; i < count; i++)
          to[i] = *element(chunk, i);
      }
    });
  }

  // Brings the residual to a block that nothing reads any more.
  __device__ __forceinline__ void bring(uint32_t block, int pass) const {
    each(args.residual, block, pass, [&](const Element* from, uint32_t chunk, int count) {
      if (count == kChunk && (args.width | column) % kChunk == 0) {
        ptx::copy_chunk(chunk, from);
      } else {
#pragma unroll 1
        for (int i = 0; i < count; i++)
          *element(chunk, i) = from[i];
      }
    });
  }

 private:
  // Calls with the place in Y or its like, the chunk, and how many outputs there are.
  template <class Outputs, class Function>
  __device__ __forceinline__ void each(Outputs* all, uint32_t block, int pass,
                                       Function function) const {
    const int lane = lane_anew(), first = lane / Row::kChunks, chunk = lane % Row::kChunks;
    const int before = pass * kPassColumns + chunk * kChunk, row_before = pass * kPassRows + first;
    const int count = min(kChunk, columns - before);
    Outputs* at = all + static_cast<int64_t>(row + row_before) * args.width + column + before;
#pragma unroll
    for (int i = 0; i < kCount; i++, at += kStep * args.width) {
      if (row_before + i * kStep >= rows) continue;
      function(at, block + Row::place(first + i * kStep, chunk), count);
    }
  }
  static __device__ __forceinline__ Element* element(uint32_t chunk, int number) {
    return reinterpret_cast<Element*>(smem + (chunk - ptx::smem_address(smem))) + number;
  }
};
