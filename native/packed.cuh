// A packed matrix in several tiers (dakrun/formats/ has the layout), for kernels that read any of
// its rows in place.
#pragma once

#include "format.cuh"
#include "ptx.cuh"

// How a tier's row blocks are stored: row blocks of a wave and of a group, atoms along K of a step
// (Tier in splitk_gemm.cuh has the terms).
struct PackedTier {
  int first_row_block;  // of the matrix; the tier ends where the next one begins
  int wave_row_blocks, group_row_blocks, step_atoms;
};

struct PackedMatrix {
  const uint64_t* addresses;  // [tier_count], in global memory: where each tier's row blocks lie
  int tier_count;
  int atoms;                        // along the columns
  PackedTier tiers[kMaxTiers + 1];  // one more for the last tier's end
};

// number / by for non-negative integers below 2^21, in fewer instructions than a division: a CTA
// waits for these before its first copy.
__device__ __forceinline__ int quotient(int number, int by) {
  const int about = static_cast<int>(__fdividef(number, by));
  const int left = number - about * by;
  return about + (left >= by) - (left < 0);
}

// Where a row block of a matrix lies: its wave, [steps][groups][atoms along the columns][row
// blocks], and its group in the wave.
struct RowBlock {
  const uint8_t* wave;
  int wave_row_blocks, step_atoms, atoms;
  int group, group_row_blocks;  // the group's first row block in the wave, and its size
  int in_group;                 // its number in the group

  __device__ __forceinline__ RowBlock(const PackedMatrix& matrix, int row_block)
      : atoms(matrix.atoms) {
    const int number = tier_of(matrix, row_block);
    const PackedTier &tier = matrix.tiers[number], &next = matrix.tiers[number + 1];
    row_block -= tier.first_row_block;
    const int first = quotient(row_block, tier.wave_row_blocks) * tier.wave_row_blocks;
    row_block -= first;
    wave = ptx::load_address(matrix.addresses + number) +
           static_cast<int64_t>(first) * atoms * kWAtomBytes;
    wave_row_blocks =
        min(tier.wave_row_blocks, next.first_row_block - tier.first_row_block - first);
    group = quotient(row_block, tier.group_row_blocks) * tier.group_row_blocks;
    group_row_blocks = min(tier.group_row_blocks, wave_row_blocks - group);
    in_group = row_block - group;
    step_atoms = tier.step_atoms;
  }

  // Of a matrix that stacks others, of `height` row blocks each, with groups of their own: a row
  // block of the one that begins at row block `first`, and lies `shift` bytes behind its index.
  __device__ __forceinline__ RowBlock(const PackedMatrix& matrix, int row_block, int first,
                                      int height, int64_t shift)
      : atoms(matrix.atoms), group(0) {
    const int number = tier_of(matrix, row_block);
    const PackedTier &tier = matrix.tiers[number], &next = matrix.tiers[number + 1];
    const int group_row_blocks = tier.group_row_blocks;
    const int in_it = quotient(row_block - first, group_row_blocks) * group_row_blocks;
    const int begin = max(first + in_it, tier.first_row_block);
    wave_row_blocks =
        min(first + min(in_it + group_row_blocks, height), next.first_row_block) - begin;
    wave = ptx::load_address(matrix.addresses + number) + shift +
           static_cast<int64_t>(begin - tier.first_row_block) * atoms * kWAtomBytes;
    this->group_row_blocks = wave_row_blocks;
    in_group = row_block - begin;
    step_atoms = tier.step_atoms;
  }

  // The first atom of a step.
  __device__ __forceinline__ int step_of(int atom) const {
    return quotient(atom, step_atoms) * step_atoms;
  }

  // Address of an atom: 8 rows of 128 bytes, whose chunks are swizzled. In formats with units, of
  // the unit that begins with this atom.
  __device__ __forceinline__ const uint8_t* atom(int number) const {
    const int step = step_of(number);
    const int depth = min(step_atoms, atoms - step);
    const int before =
        step * wave_row_blocks + group * depth + (number - step) * group_row_blocks +
                       in_group * kUnitAtoms;
    return wave + static_cast<int64_t>(before) * kWAtomBytes;
  }

  // Address of 16 bytes of a row: the columns from 8 * number on.
  __device__ __forceinline__ const uint8_t* chunk(int row, int number) const {
    const int swizzled = number % kAtomChunks ^ row;
    return atom(number / kAtomChunks) + (row * kAtomChunks + swizzled) * 16;
  }

 private:
  __device__ __forceinline__ static int tier_of(const PackedMatrix& matrix, int row_block) {
    int number = 0;
    while (number + 1 < matrix.tier_count && row_block >= matrix.tiers[number + 1].first_row_block)
      number++;
    return number;
  }
};

// Iterator over a row block's atoms, or units, along the columns, from the one that begins with atom
// `number` on. Behind each lie the same columns of the next row blocks of its group. The time of
// next() delays a copy, so it has no divisions.
struct RowBlockAtoms {
  const uint8_t* from;  // the atom

  __device__ __forceinline__ RowBlockAtoms(const RowBlock& row_block, int number)
      : from(row_block.atom(number)),
        step(row_block.wave + static_cast<int64_t>(row_block.step_of(number)) *
                                  row_block.wave_row_blocks * kWAtomBytes),
        group(row_block.group),
        in_group(row_block.in_group),
        step_atoms(row_block.step_atoms),
        group_bytes(row_block.group_row_blocks * kUnitBytes),
        step_bytes(row_block.step_atoms * row_block.wave_row_blocks * kWAtomBytes),
        behind(row_block.atoms - row_block.step_of(number)),
        left(min(row_block.step_atoms, behind) - number + row_block.step_of(number)) {}

  __device__ __forceinline__ void next() {
    from += group_bytes;
    if ((left -= kUnitAtoms) > 0) return;
    step += step_bytes;
    behind -= step_atoms;
    left = min(step_atoms, behind);
    from = step + (group * left + in_group * kUnitAtoms) * kWAtomBytes;
  }

 private:
  const uint8_t* step;
  const int group, in_group, step_atoms, group_bytes;
  const int step_bytes;  // a wave's step is below 2 GiB
  int behind;            // atoms from the step's first on
  int left;              // in the step
};
