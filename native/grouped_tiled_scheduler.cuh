// The tiles of a CTA of the grouped tiled GEMM. The W producer finds them, and tells the other
// warps through a queue in shared memory.
#pragma once

#include "tiled_gemm.cuh"

// The first row block of a tile's expert, and where the tile's rows of X end.
struct TileBounds {
  int first_row_block, rows_end;

  __device__ __forceinline__ int n_end(const TiledGemmArgs&) const { return rows_end; }
};

// A tile: some rows of W and of X of one expert.
struct TileSlot : TileBounds {
  int row_block, row_blocks;  // of W, counted from the matrix's first; none: no tile is left
  int n;                      // the first row of X
};

// The W producer fills slots round-robin. Every other warp that needs the tiles reads each slot.
struct TileQueue {
  static constexpr int kSlots = 4;
  static constexpr int kReaders = kConsumerWarps + (TALL ? 2 : 1);  // and one or two of the producers

  uint64_t full_barriers[kSlots], empty_barriers[kSlots];
  TileSlot slots[kSlots];

  // By one thread.
  __device__ __forceinline__ void initialize() {
    for (int i = 0; i < kSlots; i++) {
      ptx::mbarrier_init(full_barrier(i), kArrivalsOfWarp);
      ptx::mbarrier_init(empty_barrier(i), kReaders * kArrivalsOfWarp);
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t full_barrier(int slot) const {
    return ptx::smem_address(full_barriers + slot);
  }
  __device__ __forceinline__ uint32_t empty_barrier(int slot) const {
    return ptx::smem_address(empty_barriers + slot);
  }
  // By a warp that has filled a slot, or read it.
  static __device__ __forceinline__ void arrive(uint32_t barrier) {
    __syncwarp();
    if (arrives_for_warp()) ptx::mbarrier_arrive(barrier);
  }
};

// The CTA's queue.
__device__ __forceinline__ TileQueue& tile_queue() {
  __shared__ TileQueue queue;
  return queue;
}

// Iterator over the CTA's tiles, by a warp that reads the queue. The fields of TileSlot are those
// of the current tile.
struct Tiles : TileSlot {
  static constexpr int k = 0;  // a tile has all atoms along K
  static constexpr bool loads_partial = false, stores_partial = false;

  const TiledGemmArgs& args;
  const int tier, k_end;
  int turn = -1;
  RingPosition slot;

  __device__ __forceinline__ Tiles(const TiledGemmArgs& args, const CtaCoord& cta)
      : args(args), tier(cta.tier), k_end(args.weight.atoms) {}

  // Goes to the first tile, or the next; false where there is none.
  __device__ __forceinline__ bool next() {
    TileQueue& queue = tile_queue();
    turn++;
    wait_barrier(queue.full_barrier(slot.stage), slot.parity);
    static_cast<TileSlot&>(*this) = queue.slots[slot.stage];
    TileQueue::arrive(queue.empty_barrier(slot.stage));
    slot.advance(TileQueue::kSlots);
    return row_blocks > 0;
  }
  __device__ __forceinline__ bool first() const { return turn == 0; }
  // Asked where CTAs split K, which they do not here.
  __device__ __forceinline__ uint32_t parity() const { return turn & 1; }
  __device__ __forceinline__ bool last() const { return false; }
};

// The same by the W producer, a whole warp, which finds the tiles.
//
// A tier's tiles are numbered expert by expert, then along W, then along X: CTAs compute tiles with
// the same rows of W at the same time, so that W comes from HBM once. A lane knows one of 32
// experts.
struct TileScheduler : Tiles {
  __device__ __forceinline__ TileScheduler(const TiledGemmArgs& args, const CtaCoord& cta)
      : Tiles(args, cta), number(cta.cluster) {}

  __device__ __forceinline__ bool next() {
    turn++;
    if (turn == 0) {
      if (!args.listed) ptx::wait_for_dependencies();
      count_tiles();
    } else {
      take();
    }
    find();
    TileQueue& queue = tile_queue();
    wait_barrier(queue.empty_barrier(slot.stage), slot.parity ^ 1);
    if (threadIdx.x % 32 == 0) queue.slots[slot.stage] = *this;
    TileQueue::arrive(queue.full_barrier(slot.stage));
    slot.advance(TileQueue::kSlots);
    return row_blocks > 0;
  }
  // Where a row block of the tile's expert lies.
  __device__ __forceinline__ RowBlock row_block_at(int row_block) const {
    const int height = args.expert_row_blocks;
    const int64_t shift =
        args.shifts == nullptr ? 0 : args.shifts[quotient(first_row_block, height)];
    return RowBlock(args.weight, row_block, first_row_block, height, shift);
  }

 private:
  int number;            // of the current tile, in the tier
  int first_expert = 0;  // of 32
  int before = 0;        // tiles of the experts before them
  int end;               // the end of the rows of X of the lane's expert,
  int rows;              // how many there are,
  int tiles_end;         // the tiles of the 32 experts up to the lane's,
  int x_tiles;           // and the expert's tiles along X

  // The expert's row blocks in the tier: the first one, and the end. There may be none.
  __device__ __forceinline__ int begin_of(int expert) const {
    return max(expert * args.expert_row_blocks, args.tiers[tier].first_row_block);
  }
  __device__ __forceinline__ int end_of(int expert) const {
    return min((expert + 1) * args.expert_row_blocks, args.tiers[tier + 1].first_row_block);
  }

  // Counts the tiles of 32 experts.
  __device__ __forceinline__ void count_tiles() {
    const int lane = threadIdx.x % 32, expert = min(first_expert + lane, args.experts - 1);
    end = ptx::load_from_l2(args.ends + expert);
    rows = end - (expert > 0 ? ptx::load_from_l2(args.ends + expert - 1) : 0);
    x_tiles = quotient(rows + args.x_rows - 1, args.x_rows);
    const int size = args.tiers[tier].tile_row_blocks;
    tiles_end = quotient(max(0, end_of(expert) - begin_of(expert)) + size - 1, size) * x_tiles;
    if (first_expert + lane >= args.experts) tiles_end = 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int more = __shfl_sync(0xffffffff, tiles_end, max(lane - distance, 0));
      if (lane >= distance) tiles_end += more;
    }
  }

  // Takes the number of the next tile. After the tier's last tile each cluster that had one takes a
  // number once more, the last one the number of all tiles: it resets the counter.
  __device__ __forceinline__ void take() {
    const int clusters = args.tiers[tier].clusters;
    ptx::wait_for_dependencies();  // the predecessor kernel may use the same counter
    if (threadIdx.x % 32 == 0) number = clusters + atomicAdd(args.taken + tier, 1);
    number = __shfl_sync(0xffffffff, number, 0);
  }

  // Finds the tile of the number, which is larger than the one before.
  __device__ __forceinline__ void find() {
    int all = __shfl_sync(0xffffffff, tiles_end, 31);
    while (number >= before + all) {
      if (first_expert + 32 >= args.experts) {
        row_blocks = 0;
        const bool last = number - args.tiers[tier].clusters == before + all - 1;
        if (turn > 0 && last && threadIdx.x % 32 == 0) args.taken[tier] = 0;
        return;
      }
      before += all;
      first_expert += 32;
      count_tiles();
      all = __shfl_sync(0xffffffff, tiles_end, 31);
    }
    const int at = number - before;
    const int owner = __popc(__ballot_sync(0xffffffff, at >= tiles_end));
    const int expert = first_expert + owner, lane_before = max(owner - 1, 0);
    const int of_others = __shfl_sync(0xffffffff, tiles_end, lane_before);
    const int in_expert = owner > 0 ? at - of_others : at;
    const int along_x = __shfl_sync(0xffffffff, x_tiles, owner);
    const int w = quotient(in_expert, along_x), x = in_expert - w * along_x;
    const int size = args.tiers[tier].tile_row_blocks;
    row_block = begin_of(expert) + w * size;
    row_blocks = min(size, end_of(expert) - row_block);
    first_row_block = expert * args.expert_row_blocks;
    // The expert's tiles along X have as many rows each, a multiple of those of the smallest box.
    const int expert_end = __shfl_sync(0xffffffff, end, owner);
    const int count = __shfl_sync(0xffffffff, rows, owner), box = args.rest_rows;
    const int tile_rows = quotient(count + along_x * box - 1, along_x * box) * box;
    n = expert_end - count + x * tile_rows;
    rows_end = min(expert_end, n + tile_rows);
  }
};
