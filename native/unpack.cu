// Unpacks rows of a packed matrix in several memory tiers into a dense matrix.
//
//   for each row block and kAtoms consecutive atoms of it, one warp:
//     load the atoms from the row block's tier, 1 KiB contiguous each   // before the wait: weights
//     elements of fewer bits: expand and scale them to 16-bit atoms in shared memory
//     wait for predecessor kernels, which may still use `out`
//     store 128 contiguous bytes of each atom to each of the 8 rows

#include "packed.cuh"
#if CODE
#include "units.cuh"
#endif

constexpr int kThreads = ELEMENTWISE_THREADS;
constexpr int kAtoms = UNPACK_ATOMS;  // of a warp
constexpr int kHalves = 2;
constexpr int kHalfRows = kRowsPerBlock / kHalves;  // rows of an atom per load, 16 bytes a lane

struct UnpackArgs {
  uint4* out;  // [rows, chunks], chunks of 8 elements
  int rows, chunks;
  int first_row_block;  // of `weight`, the first row block of `out`
  int row_block_ctas;   // CTAs per row block
  PackedMatrix weight;
};

#if CODE
// A lane's part of an atom of 16 bits, [halves][lanes][16 bytes]: of the unit's atom `atom`.
__device__ __forceinline__ void load(uint4 (&to)[kHalves], const uint8_t* unit, int atom) {
  __shared__ uint4 staged[kThreads / 32][kAtomBytes / 16];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pairs(unit, atom, lane).store(ptx::smem_address(staged[warp]), lane);
  __syncwarp();
#pragma unroll
  for (int half = 0; half < kHalves; half++)
    to[half] = staged[warp][32 * half + lane];
  __syncwarp();
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    unpack(const __grid_constant__ UnpackArgs args) {
  ptx::launch_dependents();
  const int row_block = blockIdx.x / args.row_block_ctas, lane = threadIdx.x % 32;
  const int warp = blockIdx.x % args.row_block_ctas * (kThreads / 32) + threadIdx.x / 32;
  const int first_atom = warp * kAtoms;
  const RowBlock from(args.weight, args.first_row_block + row_block);
  uint4 moved[kAtoms][kHalves];
#pragma unroll
  for (int i = 0; i < kAtoms; i++) {
    if (first_atom + i >= args.weight.atoms) break;
#if CODE
    load(moved[i], from.atom(first_atom + i - i % kUnitAtoms), i % kUnitAtoms);
#else
    const auto* const atom = reinterpret_cast<const uint4*>(from.atom(first_atom + i));
#pragma unroll
    for (int half = 0; half < kHalves; half++)
      moved[i][half] = atom[32 * half + lane];
#endif
  }
  ptx::wait_for_dependencies();
#pragma unroll
  for (int i = 0; i < kAtoms; i++) {
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
      const int row = kHalfRows * half + lane / kAtomChunks;
      const int chunk = (first_atom + i) * kAtomChunks + (lane % kAtomChunks ^ row);
      const int out_row = row_block * kRowsPerBlock + row;
      if (out_row >= args.rows || chunk >= args.chunks) continue;
      args.out[static_cast<int64_t>(out_row) * args.chunks + chunk] = moved[i][half];
    }
  }
}
