// A packed matrix in several tiers (dakrun/kernels/packing.py), for kernels that read any of its
// rows where they lie.
#pragma once

#include "ptx.cuh"

constexpr int kMaxTiers = 9;
constexpr int kOctetRows = 8;
constexpr int kAtomChunks = 8;  // a row, of 16 bytes
constexpr int kAtomBytes = 1024;

struct PackedTier {
  const uint8_t* base;
  int first_octet;  // octets of this tier: to the next tier's first
  int wave_octets, group_octets, step_atoms;
};

struct PackedMatrix {
  int tier_count;
  int atoms;                        // along the columns
  PackedTier tiers[kMaxTiers + 1];  // one more, for the end
};

// Of numbers that are not negative, below 2^21: fewer instructions than a division has, all of
// which a CTA that starts waits for.
__device__ __forceinline__ int quotient(int number, int by) {
  const int about = static_cast<int>(__fdividef(number, by));
  const int left = number - about * by;
  return about + (left >= by) - (left < 0);
}

// An octet of a matrix: its wave, [steps][groups][atoms along the columns][octets], and its place
// in there.
struct Octet {
  const uint8_t* wave;
  int wave_octets, step_atoms, atoms;
  int group, group_octets;  // the group's first octet in the wave, and how many it has
  int place;                // in the group

  __device__ __forceinline__ Octet(const PackedMatrix& matrix, int octet) : atoms(matrix.atoms) {
    int number = 0;
    while (number + 1 < matrix.tier_count && octet >= matrix.tiers[number + 1].first_octet)
      number++;
    const PackedTier &tier = matrix.tiers[number], &next = matrix.tiers[number + 1];
    octet -= tier.first_octet;
    const int first = quotient(octet, tier.wave_octets) * tier.wave_octets;
    octet -= first;
    wave = tier.base + static_cast<int64_t>(first) * atoms * kAtomBytes;
    wave_octets = min(tier.wave_octets, next.first_octet - tier.first_octet - first);
    group = quotient(octet, tier.group_octets) * tier.group_octets;
    group_octets = min(tier.group_octets, wave_octets - group);
    place = octet - group;
    step_atoms = tier.step_atoms;
  }

  // The first atom of a step.
  __device__ __forceinline__ int step_of(int atom) const {
    return quotient(atom, step_atoms) * step_atoms;
  }

  // 8 rows of 128 bytes, whose chunks are swizzled.
  __device__ __forceinline__ const uint8_t* atom(int number) const {
    const int step = step_of(number);
    const int depth = min(step_atoms, atoms - step);
    const int before = step * wave_octets + group * depth + (number - step) * group_octets + place;
    return wave + static_cast<int64_t>(before) * kAtomBytes;
  }

  // 16 bytes: the columns from 8 * number on.
  __device__ __forceinline__ const uint8_t* chunk(int row, int number) const {
    const int swizzled = number % kAtomChunks ^ row;
    return atom(number / kAtomChunks) + (row * kAtomChunks + swizzled) * 16;
  }
};

// The atoms of an octet from `number` on, one after the other, and with them those of the octets
// behind it in its group. One warp goes through them, an instruction after the other, so what the
// next one costs counts: no division.
struct OctetAtoms {
  const uint8_t* from;  // the atom

  __device__ __forceinline__ OctetAtoms(const Octet& octet, int number)
      : from(octet.atom(number)),
        step(octet.wave +
             static_cast<int64_t>(octet.step_of(number)) * octet.wave_octets * kAtomBytes),
        group(octet.group),
        place(octet.place),
        step_atoms(octet.step_atoms),
        group_bytes(octet.group_octets * kAtomBytes),
        step_bytes(octet.step_atoms * octet.wave_octets * kAtomBytes),
        behind(octet.atoms - octet.step_of(number)),
        left(min(octet.step_atoms, behind) - number + octet.step_of(number)) {}

  __device__ __forceinline__ void next() {
    from += group_bytes;
    if (--left > 0) return;
    step += step_bytes;
    behind -= step_atoms;
    left = min(step_atoms, behind);
    from = step + (group * left + place) * kAtomBytes;
  }

 private:
  const uint8_t* step;
  const int group, place, step_atoms, group_bytes;
  const int step_bytes;  // a wave's step is below 2 GiB
  int behind;            // atoms from the step's first on
  int left;              // in the step
};
