// Operands of prompt attention and store_kv for the rows of a step, each with the newest tokens of a
// slot: tiles, and the addresses of new keys and values.
//
// `Args` are the arguments of row_tiles.cu or draft_tokens.cu, which both have the addresses of KV
// blocks (`tables` [slots][table_blocks]), the strides in bytes of the cache, and sizes of tiles.
#pragma once

#include "geometry.cuh"
#include "prompt_tile.cuh"
#include "kv_address.cuh"

// Where the keys and values of a slot's position are stored.
template <typename Args>
__device__ __forceinline__ KVAddress kv_address_of(const Args& args, int slot, int position) {
  const uint64_t block =
      args.tables[static_cast<int64_t>(slot) * args.table_blocks + position / kKvBlock];
  return {reinterpret_cast<uint8_t*>(block) + position % kKvBlock * args.row_bytes,
          args.layer_bytes, args.head_bytes};
}

// Write the tile of a row for range `split` of its KV blocks: `queries` tokens from position `start`
// on. The tile is empty if `queries` is 0, or if the row has no such range.
template <typename Args>
__device__ __forceinline__ void write_tile(const Args& args, int row, int split, int slot,
                                           int start, int queries) {
  PromptTile tile = {};
  tile.splits = 1;
  const int blocks = queries > 0 ? (start + queries - 1) / kKvBlock + 1 : 0;
  const int splits = max(1, min(blocks / args.split_blocks, args.max_splits));
  if (split < splits && queries > 0) {
    tile.row = row * args.width, tile.queries = queries;
    tile.position = start, tile.length = start + queries;
    tile.slot = slot;
    tile.first_block = split * blocks / splits;
    tile.blocks = (split + 1) * blocks / splits - tile.first_block;
    tile.split = split, tile.splits = splits;
    tile.partial = row * args.max_splits * args.width * args.group;
    tile.arrivals = row * args.kv_heads * args.parts;
  }
  args.tiles[row * args.max_splits + split] = tile;
}
