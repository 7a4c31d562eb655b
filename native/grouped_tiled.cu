// Grouped tiled GEMM: the tiled GEMM for a W that stacks the matrices of experts, [E M, K], and rows
// of X that are sorted by expert. Each row is multiplied by the matrix of its expert alone.
//
//   W producer warp:
//     wait for the kernel that wrote `ends`, unless it was complete when the launch started
//     for each tile, some rows of W and of X of one expert:
//       the first tile by the number of the CTA in its tier, each further one from a counter
//       tell the CTA's other warps, through a queue in shared memory
//       copy the tile's row blocks of W
//   X producer warp, consumers: as in tiled_gemm.cu, tiles from the queue
//
// The grid is fixed and nothing is known to the host, so the launch can be part of a graph. A box of
// X may reach into the rows of the next expert: their sums are not stored. A tall tile (`TALL`) has
// all rows of X of nearly every expert, so that W is read once, and multiplies as many columns as
// it has rows (grouped_tiled_multiply.cuh). Stages have room for `x_rows`, which the host chooses by
// the experts' mean. CTAs share no operands and do not split K, so the order in which an output's
// terms are added does not depend on how many rows its expert has.

#define GROUPED 1
#include "tiled_gemm.cu"
