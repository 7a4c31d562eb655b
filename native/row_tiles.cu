// Tiles of queries of decode rows, one token each, and the addresses of their new keys and values.
// For models with more query heads a KV head than SplitK_FlashAttn takes: prompt attention attends
// from their rows instead.
//
//   for each row, one warp:
//     lane 0: write where the row's new keys and values belong
//     each lane: write tiles, one for each range (split) of KV blocks; without work a tile is empty

#include "row_tiles.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS;

struct RowTilesArgs {
  const int* lengths;      // [rows], negative in rows without a request
  const int* slots;        // [rows]
  const uint64_t* tables;  // [slots][table_blocks]: addresses of KV blocks
  KVAddress* kv_addresses;         // [rows]
  PromptTile* tiles;       // [rows][max_splits]
  int64_t layer_bytes, head_bytes, row_bytes;
  int rows, table_blocks;
  int width;  // tokens of a row
  int max_splits, split_blocks;
  int kv_heads, group, parts;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    row_tiles(const __grid_constant__ RowTilesArgs args) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int row = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= args.rows) return;
  const int slot = args.slots[row], position = args.lengths[row];
  if (lane == 0)
    args.kv_addresses[row] = position >= 0 ? kv_address_of(args, slot, position) : KVAddress{};
  for (int split = lane; split < args.max_splits; split += 32)
    write_tile(args, row, split, slot, position, position >= 0 ? 1 : 0);
}
