// How outputs of the tiled GEMM pass through shared memory on their way to Y. A thread has
// accumulators of a few columns and rows of Y, but memory is written by whole pieces of rows.
//
// Each warp has some blocks of shared memory of its own: while TMA stores one to Y, the warp fills
// another, or goes on to the next tile. Residuals are prefetched into the same blocks. The warp's
// lanes store what TMA cannot.
#pragma once

#include "tiled_scheduler.cuh"

constexpr int kPassTiles = TILED_PASS_TILES;  // tiles of a warp's accumulators that fill a block
constexpr int kPasses = TILES / kPassTiles;
constexpr int kMinOutputBlocks = TILED_MIN_OUTPUT_BLOCKS;
constexpr int kRowChunks = WIDE ? kPassTiles : 2;
constexpr int kBlockRows = WIDE ? 16 : 8 * kPassTiles;
constexpr int kBlockBytes = kBlockRows * kRowChunks * 16;

// Each kind of epilogue has code of its own, as short as possible: tensor cores idle meanwhile.
enum EpilogueKind : int { kPlain, kWithResidual, kGated };

__device__ __forceinline__ EpilogueKind epilogue_kind(const TiledGemmArgs& args) {
  return args.activation == kSiluMul ? kGated : args.residual ? kWithResidual : kPlain;
}

// Computes a lane's outputs of a pass, without a gate: adds bias(i) to pair i, applies the
// activation and adds the residual. `words` holds the residual, packed pair by pair in the order of
// the accumulators, and is overwritten with the outputs.
template <EpilogueKind kind, class Bias>
__device__ __forceinline__ void apply_epilogue(const TiledGemmArgs& args, const float2* acc,
                                               Bias bias, uint32_t (&words)[2 * kPassTiles]) {
  float2 values[2 * kPassTiles];
#pragma unroll
  for (int i = 0; i < 2 * kPassTiles; i++)
    values[i] = acc[i];
  if (args.bias) {
#pragma unroll
    for (int i = 0; i < 2 * kPassTiles; i++)
      values[i].x += bias(i).x, values[i].y += bias(i).y;
  }
  if (args.activation == kRelu) {
#pragma unroll
    for (int i = 0; i < 2 * kPassTiles; i++)
      values[i] = relu(values[i]);
  }
#pragma unroll
  for (int i = 0; i < 2 * kPassTiles; i++) {
    if (kind == kWithResidual) {
      const float2 more = unpacked(words[i]);
      values[i].x += more.x, values[i].y += more.y;
    }
    words[i] = packed(values[i].x, values[i].y);
  }
}

// A warpgroup's part of a CTA's tile: row blocks of W, and rows of X from n on.
struct WarpgroupTile : TileBounds {
  int row_block, row_blocks;  // there may be none
  int n;

  __device__ __forceinline__ WarpgroupTile(const TiledGemmArgs& args, const Tiles& tile,
                                           int warpgroup)
      : TileBounds(tile) {
    const bool along_w = args.tiers[tile.tier].row_groups == kWarpgroups;
    const int before = along_w ? warpgroup * kTileRowBlocks : 0;
    row_block = tile.row_block + before;
    row_blocks = max(0, min(kTileRowBlocks, tile.row_blocks - before));
    n = tile.n + (along_w ? 0 : warpgroup * kXRows);
    if (n >= n_end(args)) row_blocks = 0;
  }
  __device__ __forceinline__ bool exists() const { return row_blocks > 0; }
};

// A row of a block. Gated outputs are half as many as accumulators, so they fill half of a row.
template <bool gated>
struct BlockRow {
  static constexpr int kGates = gated ? 2 : 1;
  static constexpr int kChunks = kRowChunks / kGates;
  static constexpr int kColumns = kChunks * kChunk;

  // Offset of a chunk in a block, in bytes. Chunks of rows of 16, 32 or 64 bytes are swizzled so
  // that eight rows have different banks, as a tensor map with a swizzle of that many bytes has it.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return (row * kChunks + (chunk ^ row * kChunks / 8 % kChunks)) * 16;
  }
};

// The blocks of a warp, which it uses round-robin.
struct OutputBlocks {
  const int count;
  const uint32_t first;
  uint32_t next;

  __device__ __forceinline__ explicit OutputBlocks(const TiledGemmArgs& args)
      : count(args.output_blocks),
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

// Copies between blocks and Y or the residual, for a warp's outputs of a tile. Each lane copies one
// chunk of one or two rows.
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

  __device__ __forceinline__ WarpOutputs(const TiledGemmArgs& args, const WarpgroupTile& tile)
      : args(args) {
    const int warp = ptx::opaque<uint32_t>(threadIdx.x) % kWarpgroup / 32;
    row = tile.n + (WIDE ? warp * kBlockRows : 0);
    rows = tile.n_end(args) - row;
    const int row_block = tile.row_block - tile.first_row_block;
    column = (row_block * kRowsPerBlock + (WIDE ? 0 : warp * 2 * kRowsPerBlock)) / Row::kGates;
    const int end = (row_block + tile.row_blocks) * kRowsPerBlock / Row::kGates;
    columns = min(end, args.width) - column;
    if (!WIDE) columns = min(columns, Row::kColumns);
  }

  // Passes that have outputs: the first ones.
  __device__ __forceinline__ int passes() const {
    if (rows <= 0 || columns <= 0) return 0;
    const int all =
        WIDE ? (columns + Row::kColumns - 1) / Row::kColumns : (rows + kBlockRows - 1) / kBlockRows;
    return min(kPasses, all);
  }

  // Without WIDE: passes whose blocks are full of rows, the first ones.
  __device__ __forceinline__ int whole_passes() const {
    return rows / kBlockRows;
  }

  // Whether TMA can store the blocks of the first `passes` passes: they are whole, or hold all that
  // Y has there. A box must begin at a multiple of 16 bytes, or the instruction is illegal (H200):
  // gated outputs of a tile that begins with an odd row block do not. Behind an expert's rows of Y
  // are those of the next one.
  __device__ __forceinline__ bool fit_boxes(int passes) const {
    const int wanted = WIDE ? passes * Row::kColumns : Row::kColumns;
    if (kGrouped && rows < (WIDE ? kBlockRows : passes * kBlockRows)) return false;
    return !gated && args.boxes && (columns >= wanted || column + columns == args.width);
  }

  // By one lane: starts to store a block to Y.
  __device__ __forceinline__ void store_box(uint32_t block, int pass) const {
    ptx::tensor_store(&args.y_boxes, column + pass * kPassColumns, row + pass * kPassRows, block);
  }

  // By all lanes: stores a block to Y.
  __device__ __forceinline__ void store(uint32_t block, int pass) const {
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

  // By all lanes: starts to load the residual into a block that nothing reads any more.
  __device__ __forceinline__ void load_residual(uint32_t block, int pass) const {
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
  // Calls function(address in `matrix`, chunk, number of outputs) for each of the lane's chunks.
  template <class Outputs, class Function>
  __device__ __forceinline__ void each(Outputs* matrix, uint32_t block, int pass,
                                       Function function) const {
    const int lane = opaque_lane(), first = lane / Row::kChunks, chunk = lane % Row::kChunks;
    const int before = pass * kPassColumns + chunk * kChunk, row_before = pass * kPassRows + first;
    const int count = min(kChunk, columns - before);
    Outputs* at = matrix + static_cast<int64_t>(row + row_before) * args.width + column + before;
#pragma unroll
    for (int i = 0; i < kCount; i++, at += kStep * args.width) {
      if (row_before + i * kStep >= rows) continue;
      function(at, block + Row::offset(first + i * kStep, chunk), count);
    }
  }
  static __device__ __forceinline__ Element* element(uint32_t chunk, int number) {
    return reinterpret_cast<Element*>(smem + (chunk - ptx::smem_address(smem))) + number;
  }
};
