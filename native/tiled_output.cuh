// How a warp puts the sums of a tile on their way to Y, pass by pass.
#pragma once

#if WIDE
#include "wide_epilogue.cuh"
#else
#include "tiled_epilogue.cuh"
#endif

// A warp's way through its blocks, a pass after the other.
template <Way way>
struct Passes {
  static constexpr bool kBrings = way == kWithResidual;
  static constexpr uint32_t kNone = ~0u;
  static constexpr int kLag = kLeastBlocks - 1;  // blocks that may still be read

  const WarpOutputs<way == kGated> outputs;
  Blocks& blocks;
  const int count, step;  // of passes: how many there are, and how far the next one is
  uint32_t before[kLag] = {kNone, kNone};  // the blocks of the two passes before

  __device__ __forceinline__ Passes(const TiledGemmArgs& args, const TilePart& part, Blocks& blocks,
                                    bool leaves)
      : outputs(args, part),
        blocks(blocks),
        count(leaves ? 0 : outputs.passes()),
        step(args.k_ctas) {}

  // Before the tile's products: residuals are brought for as many passes as there are blocks, from
  // the first one on. Each is a group of copies, be it empty.
  __device__ __forceinline__ void begin(int pass) const {
    until_read<0>();
    uint32_t block = blocks.next;
#pragma unroll 1
    for (int i = 0; i < blocks.count; i++, pass += step) {
      if (pass < count) outputs.bring(block, pass);
      ptx::commit_copies();
      block = blocks.after(block);
    }
  }

  // After the tile's products. Nothing reads blocks any more: the tile before was written long ago.
  __device__ __forceinline__ void begin_staging() const {
    if (!kBrings) until_read<0>();
  }

  // The block of the next pass, of which `turn` have been before in the tile. Behind the copies of
  // its residual there have been as many groups as blocks but three.
  __device__ __forceinline__ uint32_t take(int turn) const {
    if (kBrings) {
      if (blocks.count > kLeastBlocks) {
        ptx::wait_for_copies<1>();
      } else {
        ptx::wait_for_copies<0>();
      }
      sync_warp();
    } else if (turn >= blocks.count) {
      until_read<kLag>();
    }
    return blocks.take();
  }

  // By a lane that has staged its part of a pass. The block of the second pass before it is read no
  // more then, and gets the residual of the pass that will take it.
  __device__ __forceinline__ void pass_on(uint32_t block, int pass, bool boxes) {
    if (boxes) ptx::fence_proxy_async();
    sync_warp();
    if (!boxes) outputs.write(block, pass);
    if (ptx::elect_one()) {
      if (boxes) outputs.write_box(block, pass);
      ptx::commit_stores();
    }
    if (!kBrings) return;
    until_read<kLag>();
    const int next = pass + (blocks.count - kLag) * step;
    if (before[0] != kNone && next < count) outputs.bring(before[0], next);
    ptx::commit_copies();
    before[0] = before[1], before[1] = block;
  }

 private:
  // Until nothing reads blocks but those of so many passes, the last ones.
  template <int groups>
  static __device__ __forceinline__ void until_read() {
    if (ptx::elect_one()) ptx::wait_for_reads<groups>();
    sync_warp();
  }
};

// A warp's outputs of a tile, or none of them where others go on with the sums.
struct TileOutputs {
  const TiledGemmArgs& args;
  const TilePart& part;
  Blocks& blocks;
  const bool leaves;
  const Biases<kPasses> biases;  // read ahead of the sums

  __device__ __forceinline__ TileOutputs(const TiledGemmArgs& args, const TilePart& part,
                                         Blocks& blocks, bool leaves, int first)
      : args(args), part(part), blocks(blocks), leaves(leaves), biases(args, part, 0) {
    if (args.residual) passes<kWithResidual>().begin(first);
  }

  template <Way way>
  __device__ __forceinline__ Passes<way> passes() const {
    return {args, part, blocks, leaves};
  }

  // Of all passes. Each has code of its own where that is worth it, else only what differs.
  template <Way way>
  __device__ __forceinline__ void put(const Sums& sums) const {
    Passes<way> all = passes<way>();
    const Stager stager;
    const auto stage = [&](int pass, uint32_t block) {
      stager.stage<way>(args, sums.tile[0] + 2 * pass * kPassTiles, biases.in(pass), block);
    };
    all.begin_staging();
    if (way != kGated && all.outputs.are_boxes(all.count)) {
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) {
        if (pass >= all.count) continue;
        const uint32_t block = all.take(pass);
        stage(pass, block);
        all.pass_on(block, pass, true);
      }
      return;
    }
#pragma unroll 1
    for (int pass = 0; pass < all.count; pass++) {
      const uint32_t block = all.take(pass);
#pragma unroll
      for (int i = 0; i < kPasses; i++)
        if (i == pass) stage(i, block);
      all.pass_on(block, pass, all.outputs.are_boxes(pass + 1));
    }
  }
};
