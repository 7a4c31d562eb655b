// What warps leave of a KV head's parts and units, added up in their order.
#pragma once

#include "attention_state.cuh"

// Weighted values of a head, a lane's four of them, up to what all of them are to be divided by.
struct Sums {
  float4 value = {};
  float most, sum;

  // Makes of the lane's largest scores and sums of weights what each counts by, and those of all,
  // or of as many lanes side by side.
  template <int lanes = 32, int kTotals>
  __device__ __forceinline__ void weigh(float2 (&totals)[kTotals]) {
    most = kNone, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kTotals; i++)
      most = fmaxf(most, totals[i].x);
#pragma unroll
    for (int far = 1; far < lanes; far *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, far));
#pragma unroll
    for (int i = 0; i < kTotals; i++) {
      totals[i].x = ptx::exp2(totals[i].x - most);
      sum += totals[i].x * totals[i].y;
    }
#pragma unroll
    for (int far = 1; far < lanes; far *= 2)
      sum += __shfl_xor_sync(0xffffffff, sum, far);
  }
  __device__ __forceinline__ void add(float by, const float4& more) {
    value.x += by * more.x, value.y += by * more.y;
    value.z += by * more.z, value.w += by * more.w;
  }
  __device__ __forceinline__ void leave(float* to) const {
    const int lane = lane_anew();
    if (4 * lane < HEAD_DIM) reinterpret_cast<float4*>(to)[lane] = value;
    if (lane == 0) to[HEAD_DIM] = most, to[HEAD_DIM + 1] = sum;
  }
  __device__ __forceinline__ void store(Element* to) const {
    const int lane = lane_anew();
    if (4 * lane >= HEAD_DIM) return;
    const float scale = 1.0f / sum;
    uint32_t* const out = reinterpret_cast<uint32_t*>(to + 4 * lane);
    out[0] = packed(scale * value.x, scale * value.y);
    out[1] = packed(scale * value.z, scale * value.w);
  }
};

// Which four dimensions of a head are a lane's; those behind the last are the last once more.
__device__ __forceinline__ int lanes_dimension() {
  return min(4 * static_cast<int>(lane_anew()), HEAD_DIM - 4);
}

__device__ __forceinline__ const float2* totals_of(const float* head) {
  return reinterpret_cast<const float2*>(head + HEAD_DIM);
}

// Of a head, the parts of a unit in their order. Lane p has the warp that has left part p in the
// ring, or kInMemory.
constexpr int kInMemory = -1;

__device__ __forceinline__ Sums add_parts(const Row& row, const Held& of, int head, int holder) {
  const int lane = lane_anew(), parts = of.parts;
  const float* const near = reinterpret_cast<const float*>(smem) + head * kPart;
  const float* const far = row.part(of.unit, 0) + head * kPart;
  float2 totals[1] = {{kNone, 0.0f}};
  if (holder >= 0) {
    totals[0] = *totals_of(near + holder * row.size);
  } else if (lane < parts) {
    totals[0] = ptx::load_from_l2(totals_of(far + lane * row.size));
  }
  float4 values[kWarps];
#pragma unroll
  for (int part = 0; part < kWarps; part++) {
    values[part] = {};
    const int from = __shfl_sync(0xffffffff, holder, part);
    const int at = (from < 0 ? part : from) * row.size + lanes_dimension();
    if (from >= 0) {
      values[part] = *reinterpret_cast<const float4*>(near + at);
    } else if (part < parts) {
      values[part] = ptx::load_from_l2(reinterpret_cast<const float4*>(far + at));
    }
  }
  Sums sums;
  sums.weigh(totals);
#pragma unroll
  for (int part = 0; part < kWarps; part++)
    sums.add(__shfl_sync(0xffffffff, totals[0].x, part), values[part]);
  return sums;
}

// How many units are under way together; elsewhere more would spill.
#if __CUDA_ARCH__ == 900
constexpr int kTogether = 16;
#else
constexpr int kTogether = 4;
#endif

// Of a head, all units in their order. Many are under way together: to wait for one takes the
// better part of a microsecond, and that at the end of a kernel.
__device__ __forceinline__ Sums add_units(const Row& row, int head) {
  constexpr int kTotals = kMaxUnits / 32;
  const int lane = lane_anew(), units = row.units, stride = row.args.max_parts * row.size;
  const float* const first = row.part(0, 0) + head * kPart;
  float2 totals[kTotals];  // of unit lane + 32 i
#pragma unroll
  for (int i = 0; i < kTotals; i++) {
    totals[i] = {kNone, 0.0f};
    if (32 * i + lane < units) {
      totals[i] = ptx::load_from_l2(totals_of(first + (32 * i + lane) * stride));
    }
  }
  Sums sums;
#pragma unroll 1
  for (int from = 0; from < units; from += kTogether) {
    float4 values[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const float* const at = first + (from + j) * stride + lanes_dimension();
      values[j] = ptx::load_from_l2_or_zero(reinterpret_cast<const float4*>(at), from + j < units);
    }
    if (from == 0) {
      sums.weigh(totals);
    } else if (from % 32 == 0) {  // the next 32 weights are the lanes'
#pragma unroll
      for (int i = 0; i + 1 < kTotals; i++)
        totals[i] = totals[i + 1];
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++)
      sums.add(__shfl_sync(0xffffffff, totals[0].x, from % 32 + j), values[j]);
  }
  return sums;
}

// Of some heads from `first_head` on, of which those in `wanted` are stored, all units, few as they
// are: the same sums, for whose parts a warp waits but once.
constexpr int kFewUnits = 8;
constexpr int kHeads = kTogether > 4 ? 2 : 1;

__device__ __forceinline__ void add_few_units(const Row& row, int first_head, uint32_t wanted) {
  const int lane = lane_anew(), units = row.units, stride = row.args.max_parts * row.size;
  const float* const first = row.part(0, 0);
  const auto part_of = [&](int head) {
    return first + min(first_head + head, row.args.group - 1) * kPart;
  };
  float2 totals[1] = {{kNone, 0.0f}};  // of head lane / kFewUnits, unit lane % kFewUnits
  if (lane % kFewUnits < units) {
    totals[0] = ptx::load_from_l2(totals_of(part_of(lane / kFewUnits) + lane % kFewUnits * stride));
  }
  Sums sums[kHeads];
#pragma unroll
  for (int from = 0; from < kFewUnits; from += 4) {
    if (from >= units) break;
    float4 values[kHeads][4];
#pragma unroll
    for (int head = 0; head < kHeads; head++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float* const at = part_of(head) + (from + j) * stride + lanes_dimension();
        values[head][j] =
            ptx::load_from_l2_or_zero(reinterpret_cast<const float4*>(at), from + j < units);
      }
    }
    if (from == 0) sums[0].weigh<kFewUnits>(totals);
#pragma unroll
    for (int head = 0; head < kHeads; head++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = head * kFewUnits + from + j;
        sums[head].add(__shfl_sync(0xffffffff, totals[0].x, at), values[head][j]);
      }
    }
  }
  const float sum = sums[0].sum;
#pragma unroll
  for (int head = 0; head < kHeads; head++) {
    sums[head].sum = __shfl_sync(0xffffffff, sum, head * kFewUnits);
    if (wanted >> head & 1) sums[head].store(row.outputs(first_head + head));
  }
}
