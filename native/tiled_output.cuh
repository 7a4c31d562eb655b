// How a warp stores its outputs of a tile, pass by pass: accumulators -> block -> Y.
#pragma once

#if WIDE
#include "tiled_wide_epilogue.cuh"
#else
#include "tiled_epilogue.cuh"
#endif

// The passes of a warp over a tile: each takes an output block, which TMA or the lanes store to Y.
template <EpilogueKind kind>
struct Passes {
  static constexpr bool kResidual = kind == kWithResidual;
  static constexpr uint32_t kNone = ~0u;
  static constexpr int kLag = kMinOutputBlocks - 1;  // blocks that TMA may still read

  const WarpOutputs<kind == kGated> outputs;
  OutputBlocks& blocks;
  const int count, step;  // passes that have outputs; from one of this CTA's passes to the next
  uint32_t previous[kLag] = {kNone, kNone};  // the blocks of the two passes before

  __device__ __forceinline__ Passes(const TiledGemmArgs& args, const WarpgroupTile& tile,
                                    OutputBlocks& blocks, bool stores_partial)
      : outputs(args, tile),
        blocks(blocks),
        count(stores_partial ? 0 : outputs.passes()),
        step(args.k_ctas) {}

  // Before the tile's products: prefetches residuals for as many passes as there are blocks, from
  // pass `pass` on. Each is a group of copies, which may be empty.
  __device__ __forceinline__ void prefetch_residuals(int pass) const {
    wait_until_read<0>();
    uint32_t block = blocks.next;
#pragma unroll 1
    for (int i = 0; i < blocks.count; i++, pass += step) {
      if (pass < count) outputs.load_residual(block, pass);
      ptx::commit_copies();
      block = blocks.after(block);
    }
  }

  // After the tile's products, which took so long that TMA has read all blocks.
  __device__ __forceinline__ void begin() const {
    if (!kResidual) wait_until_read<0>();
  }

  // Takes the block for the tile's pass number `turn`. Waits until the pass's residual is in it:
  // blocks.count - 3 or more groups of copies were committed after the residual's, so with more
  // than three blocks the newest group may be in flight.
  __device__ __forceinline__ uint32_t take(int turn) const {
    if (kResidual) {
      if (blocks.count > kMinOutputBlocks) {
        ptx::wait_for_copies<1>();
      } else {
        ptx::wait_for_copies<0>();
      }
      sync_warp();
    } else if (turn >= blocks.count) {
      wait_until_read<kLag>();
    }
    return blocks.take();
  }

  // Stores a block into which all lanes have written their outputs. Then waits until TMA has read
  // the block of two passes before, and loads the residual of the pass that will take it next.
  __device__ __forceinline__ void store(uint32_t block, int pass, bool boxes) {
    if (boxes) ptx::fence_proxy_async();  // the lanes' writes come before TMA's reads
    sync_warp();
    if (!boxes) outputs.store(block, pass);
    if (ptx::elect_one()) {
      if (boxes) outputs.store_box(block, pass);
      ptx::commit_stores();
    }
    if (!kResidual) return;
    wait_until_read<kLag>();
    const int next = pass + (blocks.count - kLag) * step;
    if (previous[0] != kNone && next < count) outputs.load_residual(previous[0], next);
    ptx::commit_copies();
    previous[0] = previous[1], previous[1] = block;
  }

 private:
  // Waits until TMA has read all blocks but those of the last `groups` passes.
  template <int groups>
  static __device__ __forceinline__ void wait_until_read() {
    if (ptx::elect_one()) ptx::wait_for_reads<groups>();
    sync_warp();
  }
};

// The epilogue of a warp's part of a tile. Biases are loaded, and residuals prefetched, before the
// products. With `stores_partial` it has no outputs.
struct TileEpilogue {
  const TiledGemmArgs& args;
  const WarpgroupTile& tile;
  OutputBlocks& blocks;
  const bool stores_partial;
  const Biases<kPasses> biases;

  __device__ __forceinline__ TileEpilogue(const TiledGemmArgs& args, const WarpgroupTile& tile,
                                          OutputBlocks& blocks, bool stores_partial, int first_pass)
      : args(args),
        tile(tile),
        blocks(blocks),
        stores_partial(stores_partial),
        biases(args, tile, 0) {
    if (args.residual) passes<kWithResidual>().prefetch_residuals(first_pass);
  }

  template <EpilogueKind kind>
  __device__ __forceinline__ Passes<kind> passes() const {
    return {args, tile, blocks, stores_partial};
  }

  // Stores the outputs of all passes. The usual case is unrolled; the others share their code.
  template <EpilogueKind kind>
  __device__ __forceinline__ void store(const Accumulators& acc) const {
    Passes<kind> all = passes<kind>();
    const Stager stager;
    const auto stage = [&](int pass, uint32_t block) {
      stager.stage<kind>(args, acc.tile[0] + 2 * pass * kPassTiles, biases.in(pass), block);
    };
    all.begin();
    int first = 0;
    // Behind an expert's rows are those of the next: a last pass that is not whole is stored below.
    const int whole = kGrouped ? min(all.count, all.outputs.whole_passes()) : all.count;
    if (kind != kGated && all.outputs.fit_boxes(whole)) {
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) {
        if (pass >= whole) continue;
        const uint32_t block = all.take(pass);
        stage(pass, block);
        all.store(block, pass, true);
      }
      if (!kGrouped) return;
      first = whole;
    }
#pragma unroll 1
    for (int pass = first; pass < all.count; pass++) {
      const uint32_t block = all.take(pass);
#pragma unroll
      for (int i = 0; i < kPasses; i++)
        if (i == pass) stage(i, block);
      all.store(block, pass, all.outputs.fit_boxes(pass + 1));
    }
  }
};
