// Grouped tiled GEMM: the tiled GEMM for W that stacks the matrices of experts, [E M, K], and rows
// of X that are sorted by expert. Each row is multiplied by the matrix of its expert alone.
//
//   W producer warp:
//     wait for the kernel that wrote `ends`, if the launch may have started before it ended
//     for each tile, a range of one expert's rows of X by one of its row blocks of W:
//       the first tile by the cluster's number, each further one from a counter of the tier
//       tell the CTA's other warps: a slot of the queue
//       copy the tile's row blocks of W
//   X producer warp, consumers, warps that expand units: as in tiled_gemm.cu, by tiles of the queue
//
// Tiles of many experts are dealt to a fixed grid, so the launch needs nothing from the host: it can
// be part of a graph. Rows behind an expert's last one are multiplied where a box of X reaches
// beyond it, and not stored. Neither K nor a cluster's operands are shared, so the order in which an
// output's terms are added does not depend on how many rows its expert has.

#define GROUPED 1
#include "tiled_gemm.cu"
