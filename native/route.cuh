// The arguments of the router's kernels, and the sizes that follow from them.
//
// A *stack index* is an expert's in the stacked matrices. A *pair* is a row and an expert that it
// chose; pairs are numbered in the order of stack indices, then of rows.
#pragma once

#include "common.cuh"
#include "element.cuh"

constexpr int kWarps = ROUTE_WARPS, kThreads = 32 * kWarps;
constexpr int kMaxRows = ROUTE_MAX_ROWS;  // of a band, and of a launch that numbers pairs itself
constexpr int kPerLane = ROUTE_PER_LANE;  // experts, which follow each other
constexpr int kMaxExperts = 32 * kPerLane;
constexpr int kLine = 32;  // words of a line of the cache

struct RouteArgs {
  const Element* x;     // [n, hidden]
  const float* weight;  // [experts, hidden]
  const float* bias;    // [experts], or null: 0
  const int* lengths;   // [n], negative in rows without a request, which choose none; or null
  int* tokens;          // [n * top_k]: the row of each pair
  float* weights;       // [n * top_k]: the weight of each pair
  int* ends;            // [experts]: pairs of the stack indices up to this one
  int* pairs;           // [n, top_k]: numbers of a row's pairs, by expert; -1 without a request
  const int* stacked;   // [experts]: the stack index of each expert; null: its number
  int* use;             // [2, experts]: rows that chose it, launches that read an index; or null
  float* logits;        // [parts, n, kMaxExperts] by parts of the columns; scratch, as the next 2
  float2* chosen;       // [n, top_k]: choices, as bits. Both are unwritten before and after
  int* counts;          // [bands, experts]: rows of a band by stack index, of more than kMaxRows rows
  int n, hidden, experts, top_k;
  int band_rows, chooser_rows;  // of a CTA
  int groups, top_groups;
  int sigmoid, renormalized;
  float scale;
};

// All bits are set in a word of logits or of a choice that has not been written. No NaN that
// arithmetic makes is such a word.
constexpr uint32_t kUnwritten = 0xffffffff;
__device__ __forceinline__ uint32_t largest_word(const float4& of) {
  return max(max(__float_as_uint(of.x), __float_as_uint(of.y)),
             max(__float_as_uint(of.z), __float_as_uint(of.w)));
}
__device__ __forceinline__ void set_unwritten(float4* to) {
  *reinterpret_cast<uint4*>(to) = {kUnwritten, kUnwritten, kUnwritten, kUnwritten};
}

// What a row chose: a stack index, -1 in rows without a request, and the weight.
struct alignas(8) Choice {
  short index, row;  // of the rows that are numbered together
  float weight;
};

__device__ __forceinline__ int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}
__device__ __forceinline__ int part_count(const RouteArgs& args) {
  return ceil_div(args.hidden, ROUTE_COLS);
}
__device__ __forceinline__ int band_count(const RouteArgs& args) {
  return ceil_div(args.n, args.band_rows);
}
