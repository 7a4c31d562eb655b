// Partial results of chunks and splits, combined in order.
#pragma once

#include "attention_state.cuh"

// Combined result of a query head. A lane holds four unnormalized outputs.
struct Combined {
  float4 value = {};  // of dimensions lane_dimension() to + 3
  float row_max, row_sum;

  // Compute the combined row_max and row_sum of partial results, over all lanes or groups of
  // `lanes` lanes. In: the lane's (row_max, row_sum) pairs. Out: x is the factor that rescales each
  // partial result to the combined row_max.
  template <int lanes = 32, int kStats>
  __device__ __forceinline__ void rescale_factors(float2 (&row_stats)[kStats]) {
    row_max = kMaskedScore, row_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStats; i++)
      row_max = fmaxf(row_max, row_stats[i].x);
#pragma unroll
    for (int distance = 1; distance < lanes; distance *= 2)
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, distance));
#pragma unroll
    for (int i = 0; i < kStats; i++) {
      row_stats[i].x = ptx::exp2(row_stats[i].x - row_max);
      row_sum += row_stats[i].x * row_stats[i].y;
    }
#pragma unroll
    for (int distance = 1; distance < lanes; distance *= 2)
      row_sum += __shfl_xor_sync(0xffffffff, row_sum, distance);
  }
  __device__ __forceinline__ void add(float factor, const float4& partial) {
    value.x += factor * partial.x, value.y += factor * partial.y;
    value.z += factor * partial.z, value.w += factor * partial.w;
  }
  __device__ __forceinline__ void store_partial(float* to) const {
    const int lane = opaque_lane();
    if (4 * lane < HEAD_DIM) reinterpret_cast<float4*>(to)[lane] = value;
    if (lane == 0) to[HEAD_DIM] = row_max, to[HEAD_DIM + 1] = row_sum;
  }
  __device__ __forceinline__ void store(Element* to) const {
    const int lane = opaque_lane();
    if (4 * lane >= HEAD_DIM) return;
    const float scale = 1.0f / row_sum;
    uint32_t* const out = reinterpret_cast<uint32_t*>(to + 4 * lane);
    out[0] = packed(scale * value.x, scale * value.y);
    out[1] = packed(scale * value.z, scale * value.w);
  }
};

// First of the four dimensions of a lane. Lanes past the head repeat the last four.
__device__ __forceinline__ int lane_dimension() {
  return min(4 * static_cast<int>(opaque_lane()), HEAD_DIM - 4);
}

__device__ __forceinline__ const float2* row_stats_of(const float* head) {
  return reinterpret_cast<const float2*>(head + HEAD_DIM);
}

// Combine the chunks of a split for a query head, in order. Lane p gives as `holder` the warp whose
// slot of the ring holds chunk p, or kInGlobal if the chunk is in global memory.
constexpr int kInGlobal = -1;

__device__ __forceinline__ Combined combine_chunks(const KvHead& kv_head, const ItemRecord& of,
                                                   int head, int holder) {
  const int lane = opaque_lane(), chunks = of.chunks;
  const float* const smem_partials = reinterpret_cast<const float*>(smem) + head * kPartial;
  const float* const global_partials = kv_head.partial(of.split, 0) + head * kPartial;
  float2 row_stats[1] = {{kMaskedScore, 0.0f}};
  if (holder >= 0) {
    row_stats[0] = *row_stats_of(smem_partials + holder * kv_head.size);
  } else if (lane < chunks) {
    row_stats[0] = ptx::load_from_l2(row_stats_of(global_partials + lane * kv_head.size));
  }
  float4 values[kWarps];
#pragma unroll
  for (int chunk = 0; chunk < kWarps; chunk++) {
    values[chunk] = {};
    const int from = __shfl_sync(0xffffffff, holder, chunk);
    const int at = (from < 0 ? chunk : from) * kv_head.size + lane_dimension();
    if (from >= 0) {
      values[chunk] = *reinterpret_cast<const float4*>(smem_partials + at);
    } else if (chunk < chunks) {
      values[chunk] = ptx::load_from_l2(reinterpret_cast<const float4*>(global_partials + at));
    }
  }
  Combined combined;
  combined.rescale_factors(row_stats);
#pragma unroll
  for (int chunk = 0; chunk < kWarps; chunk++)
    combined.add(__shfl_sync(0xffffffff, row_stats[0].x, chunk), values[chunk]);
  return combined;
}

// Partial results whose loads are in flight together. More would spill on other architectures.
#if __CUDA_ARCH__ == 900
constexpr int kLoadsInFlight = 16;
#else
constexpr int kLoadsInFlight = 4;
#endif

// Combine all splits of a query head, in order. Many loads are in flight together: each round trip
// takes most of a microsecond at the end of the kernel.
__device__ __forceinline__ Combined combine_splits(const KvHead& kv_head, int head) {
  constexpr int kStats = kMaxSplits / 32;
  const int lane = opaque_lane(), splits = kv_head.splits,
            stride = kv_head.args.max_chunks * kv_head.size;
  const float* const first = kv_head.partial(0, 0) + head * kPartial;
  float2 row_stats[kStats];  // of split lane + 32 i
#pragma unroll
  for (int i = 0; i < kStats; i++) {
    row_stats[i] = {kMaskedScore, 0.0f};
    if (32 * i + lane < splits) {
      row_stats[i] = ptx::load_from_l2(row_stats_of(first + (32 * i + lane) * stride));
    }
  }
  Combined combined;
#pragma unroll 1
  for (int from = 0; from < splits; from += kLoadsInFlight) {
    float4 values[kLoadsInFlight];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; j++) {
      const float* const at = first + (from + j) * stride + lane_dimension();
      values[j] = ptx::load_from_l2_or_zero(reinterpret_cast<const float4*>(at), from + j < splits);
    }
    if (from == 0) {
      combined.rescale_factors(row_stats);
    } else if (from % 32 == 0) {  // lanes move on to the factors of the next 32 splits
#pragma unroll
      for (int i = 0; i + 1 < kStats; i++)
        row_stats[i] = row_stats[i + 1];
    }
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; j++)
      combined.add(__shfl_sync(0xffffffff, row_stats[0].x, from % 32 + j), values[j]);
  }
  return combined;
}

// Combine at most kFewSplits splits of kHeadsAtOnce query heads from `first_head` on, with a single
// round trip to memory. Same order of sums as combine_splits(). Stores the heads set in `wanted`.
constexpr int kFewSplits = 8;
constexpr int kHeadsAtOnce = kLoadsInFlight > 4 ? 2 : 1;

__device__ __forceinline__ void combine_few_splits(const KvHead& kv_head, int first_head,
                                                   uint32_t wanted) {
  const int lane = opaque_lane(), splits = kv_head.splits,
            stride = kv_head.args.max_chunks * kv_head.size;
  const float* const first = kv_head.partial(0, 0);
  const auto partial_of = [&](int head) {
    return first + min(first_head + head, kv_head.args.group - 1) * kPartial;
  };
  float2 row_stats[1] = {
      {kMaskedScore, 0.0f}};  // of head lane / kFewSplits, split lane % kFewSplits
  if (lane % kFewSplits < splits) {
    row_stats[0] =
        ptx::load_from_l2(row_stats_of(partial_of(lane / kFewSplits) + lane % kFewSplits * stride));
  }
  Combined combined[kHeadsAtOnce];
#pragma unroll
  for (int from = 0; from < kFewSplits; from += 4) {
    if (from >= splits) break;
    float4 values[kHeadsAtOnce][4];
#pragma unroll
    for (int head = 0; head < kHeadsAtOnce; head++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float* const at = partial_of(head) + (from + j) * stride + lane_dimension();
        values[head][j] =
            ptx::load_from_l2_or_zero(reinterpret_cast<const float4*>(at), from + j < splits);
      }
    }
    if (from == 0) combined[0].rescale_factors<kFewSplits>(row_stats);
#pragma unroll
    for (int head = 0; head < kHeadsAtOnce; head++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = head * kFewSplits + from + j;
        combined[head].add(__shfl_sync(0xffffffff, row_stats[0].x, at), values[head][j]);
      }
    }
  }
  const float row_sum = combined[0].row_sum;
#pragma unroll
  for (int head = 0; head < kHeadsAtOnce; head++) {
    combined[head].row_sum = __shfl_sync(0xffffffff, row_sum, head * kFewSplits);
    if (wanted >> head & 1) combined[head].store(kv_head.outputs(first_head + head));
  }
}
