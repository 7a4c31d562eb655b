// Products of prompt attention, S = Q K^T and O += P V: a warpgroup with wgmma on sm_90a, each warp
// with mma elsewhere. Both have the same fragments in the same registers.
//
// In lane 4g + t of warp w, rows g and g + 8 of the warp's 16 rows are element 2i and 2i + 1 of
// scores and outputs; x and y are positions or dimensions 8i + 2t and 8i + 2t + 1.
#pragma once

#include "prompt_attn.cuh"

constexpr int kScores = 2 * kBlock / 8;                         // float2s of a thread
constexpr int kOutputs = 2 * (WGMMA ? 8 * kPanels : kVectors);  // of wgmma: of whole panels
constexpr int kStored = 2 * kVectors;                           // those within HEAD_DIM

// Queries, or probabilities, as A operand: of every 16 columns, rows g and g + 8 with columns 2t
// and 2t + 1, then both rows with columns 2t + 8 and 2t + 9.
struct Queries {
  uint32_t step[kSteps][4];
};
struct Probabilities {
  uint32_t step[kBlock / 16][4];
};

#if WGMMA
#include "wgmma.cuh"

// Start S = Q K^T.
__device__ __forceinline__ void start_scores(const Queries& queries, uint32_t keys,
                                             float2 (&scores)[kScores]) {
  const uint64_t matrix = ptx::matrix_descriptor(keys);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    const uint64_t at = matrix + s / 4 * (kPanelBytes >> 4) + 2 * (s % 4);
    ptx::wgmma(scores, queries.step[s], at, s > 0, Element());
  }
  ptx::wgmma_commit();
}

// Start O += P V.
__device__ __forceinline__ void start_outputs(const Probabilities& probabilities, uint32_t values,
                                              float2 (&outputs)[kOutputs]) {
  const uint64_t matrix = ptx::matrix_descriptor_trans(values, kPanelBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < kBlock / 16; s++)
    ptx::wgmma_trans(outputs, probabilities.step[s], matrix + s * (16 * 128 >> 4), Element());
  ptx::wgmma_commit();
}

// Wait for the products that were started before the last.
__device__ __forceinline__ void wait_but_for_last(float2 (&scores)[kScores]) {
  ptx::wgmma_wait_but_one(scores);
}

// Compute sums of probabilities before what follows, and not after a wait.
__device__ __forceinline__ void compute_now(const float (&sums)[2], uint32_t address) {
  ptx::compute_now(sums[0], sums[1], address);
}

template <int size>
__device__ __forceinline__ void wait_for(float2 (&results)[size]) {
  ptx::wgmma_wait_for(results);
}

#else

// Address of chunk `chunk` of a row within a stage.
__device__ __forceinline__ uint32_t chunk_at(uint32_t stage, int row, int chunk) {
  return stage + chunk / 8 * kPanelBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

__device__ __forceinline__ void start_scores(const Queries& queries, uint32_t keys,
                                             float2 (&scores)[kScores]) {
  // ldmatrix rows by lane: 8 positions with 8 dimensions, with the next 8; then 8 more positions.
  const int lane = opaque_lane(), row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < kScores; i++)
    scores[i] = {0.0f, 0.0f};
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
#pragma unroll
    for (int tile = 0; tile < kBlock / 16; tile++) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, chunk_at(keys, 16 * tile + row, 2 * s + half));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float2* const of = scores + 4 * tile + 2 * i;
        ptx::mma(of[0], of[1], queries.step[s], b[2 * i], b[2 * i + 1], Element());
      }
    }
  }
}

__device__ __forceinline__ void start_outputs(const Probabilities& probabilities, uint32_t values,
                                              float2 (&outputs)[kOutputs]) {
  // ldmatrix rows by lane: 8 positions of 8 dimensions, 8 more positions; then the next dimensions.
  const int lane = opaque_lane(), row = lane % 16, half = lane / 16;
#pragma unroll
  for (int s = 0; s < kBlock / 16; s++) {
#pragma unroll
    for (int tile = 0; tile < kVectors / 2; tile++) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, chunk_at(values, 16 * s + row, 2 * tile + half));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float2* const of = outputs + 4 * tile + 2 * i;
        ptx::mma(of[0], of[1], probabilities.step[s], b[2 * i], b[2 * i + 1], Element());
      }
    }
  }
}

__device__ __forceinline__ void wait_but_for_last(float2 (&)[kScores]) {}
__device__ __forceinline__ void compute_now(const float (&)[2], uint32_t) {}

template <int size>
__device__ __forceinline__ void wait_for(float2 (&)[size]) {}

#endif
