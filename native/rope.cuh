// Rotary position embedding (RoPE, arXiv 2104.09864, half-split as in Llama).
#pragma once

// Rotate dimension `dim` < HEAD_DIM / 2 of a head (`first`) and its partner dim + HEAD_DIM / 2
// (`second`) by the cosines and sines of a position.
__device__ __forceinline__ void rotate(const float2* rotations, int dim, float& first,
                                       float& second) {
  const float2 turn = rotations[dim];
  const float before = first;
  first = before * turn.x - second * turn.y;
  second = second * turn.x + before * turn.y;
}
