// Producer warps of prompt attention: keys and values from KV blocks into the ring.
#pragma once

#include "prompt_attn.cuh"

// Copies every second block's keys, or values: four warps share the work. 16-byte copies, because rows of a block are HEAD_DIM wide and rows of a panel 64, and
// because rows past the stored positions must become zeros: memory there may be NaN, and 0 * NaN is
// NaN.
struct Producer {
  const PromptAttnArgs& args;
  const Ring& ring;
  const int lane, half, parity;  // half 0: keys, 1: values; parity of the blocks' numbers
  RingPosition fill;
  int others;            // stages that other warps fill before the next one of this warp
  uint32_t landing = 0;  // full barrier of the stage whose copies are in flight
  int number = 0;        // of the CTA's blocks so far

  __device__ __forceinline__ Producer(const PromptAttnArgs& args, const Ring& ring, int warp)
      : args(args),
        ring(ring),
        lane(threadIdx.x % 32),
        half(warp % 2),
        parity(warp / 2),
        fill(kOwnStages ? warp : 0, kStages),
        others(warp) {}

  __device__ __forceinline__ void run() {
    for (WorkItems items(args); items.next();) {
      const PromptTile& tile = items.tile;
      const uint64_t* const table =
          args.tables + static_cast<int64_t>(tile.slot) * args.table_blocks + tile.first_block;
      const int64_t offset = args.layer_offset + items.head * args.head_bytes + half * kHalfBytes;
      uint64_t addresses = 0;  // lane l: of block `from + l`
      int from = -32;
#pragma unroll 1
      for (int block = number % 2 ^ parity; block < tile.blocks; block += 2) {
        if (block >= from + 32) {
          from = block;
          addresses = from + lane < tile.blocks ? table[from + lane] : 0;
        }
        const uint64_t address = __shfl_sync(0xffffffff, addresses, block - from);
        const int64_t without = kPrefixes && address % 2 ? args.layer_offset + 1 : 0;
        copy(reinterpret_cast<const uint8_t*>(address) + offset - without,
             tile.length - (tile.first_block + block) * kBlock);
      }
      number += tile.blocks;
    }
    ptx::wait_for_copies<0>();
    announce();
  }

 private:
  // Start to copy the first `rows` rows, and zeros in in_row of others, to the next stage. Then
  // announce the stage before, so that the copies of two are in flight.
  __device__ __forceinline__ void copy(const uint8_t* from, int rows) {
    if (!kOwnStages) pass_others();
    wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
    const uint32_t stage = ring.stage(fill.stage);
    if (32 % kVectors == 0) {
      // Whole rows at a time, and of panels as wide as the cache's swizzle: offsets are constant.
      constexpr int kRows = 32 / kVectors;
      const int row = lane / kVectors, in_row = lane % kVectors;
      const uint32_t to = stage + in_row / 8 * kPanelBytes + row * 128 + in_row % 8 * 16;
      from = ptx::opaque(from + 16 * lane), rows -= row;
#pragma unroll
      for (int i = 0; i < kBlock / kRows; i++)
        ptx::copy_chunk_or_zeros(to + i * kRows * 128, from + i * 32 * 16, i * kRows < rows);
    } else {
#pragma unroll 8
      for (int i = 0; i < kBlock * kVectors / 32; i++) {
        const int vector = 32 * i + lane, row = vector / kVectors, in_row = vector % kVectors;
        const int chunk = in_row ^ row % 8 * kSwizzle / 8;  // the cache's own swizzle
        const uint32_t to = chunk / 8 * kPanelBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
        ptx::copy_chunk_or_zeros(stage + to, from + 16 * vector, row < rows);
      }
    }
    ptx::commit_copies();
    ptx::wait_for_copies<1>();
    announce();
    landing = ring.full_barrier[fill.stage];
    fill.advance(RingPosition(kOwnStages ? kProducerWarps : 1, kStages), kStages);
  }

  // In a ring whose stages warps share: pass the stages that other warps fill first, each once it is
  // empty. So the warp is never two phases ahead of a barrier, which a parity would not show. A
  // stage may be emptied only after the warp's last one has been read, so that one is announced now.
  __device__ __forceinline__ void pass_others() {
    ptx::wait_for_copies<0>();
    announce();
    landing = 0;
    for (; others > 0; others--) {
      wait_barrier(ring.empty_barrier[fill.stage], fill.parity ^ 1);
      fill.advance(kStages);
    }
    others = kProducerWarps - 1;
  }

  // Announce the stage whose copies have landed. They are generic writes, and wgmma reads shared
  // memory through the async proxy.
  __device__ __forceinline__ void announce() {
    if (landing == 0) return;
    ptx::fence_proxy_async();
    sync_warp();
    if (arrives_for_warp()) ptx::mbarrier_arrive(landing);
  }
};
