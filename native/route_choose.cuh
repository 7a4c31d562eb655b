// The experts of a row, chosen by a warp from their logits.
#pragma once

#include "cta_reduce.cuh"
#include "route.cuh"

// Larger floats have larger keys; NaN is the largest, and both zeros are equal. 0 is below all of
// them.
__device__ __forceinline__ uint32_t key(float value) {
  if (value != value) return 0xffffffff;
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
// The float of a key.
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

__device__ __forceinline__ uint32_t largest(uint32_t value) {
  return __reduce_max_sync(0xffffffff, value);
}
__device__ __forceinline__ float total(float value) {
  return reduce_warp(value, [](float a, float b) { return a + b; });
}

// The number of the lane with the largest key, or of the first of those.
__device__ __forceinline__ int first_largest(uint32_t key) {
  return __ffs(__ballot_sync(0xffffffff, key == largest(key))) - 1;
}

// The sum of the two largest of `by` in a group, whose experts follow each other.
__device__ __forceinline__ float group_score(const float* by, int size) {
  float best = by[0], second = by[1];
  if (key(second) > key(best)) best = by[1], second = by[0];
  for (int i = 2; i < size; i++) {
    if (key(by[i]) > key(best))
      second = best, best = by[i];
    else if (key(by[i]) > key(second))
      second = by[i];
  }
  return best + second;
}

// Bit g: whether group g, of `size` experts each, is one of the best. `by`, [experts], is shared.
__device__ __forceinline__ uint32_t best_groups(const RouteArgs& args, const float* by, int size) {
  const int lane = threadIdx.x % 32;
  uint32_t own = lane < args.groups ? key(group_score(by + lane * size, size)) : 0, found = 0;
  for (int i = 0; i < args.top_groups; i++) {
    const int group = first_largest(own);
    found |= 1u << group;
    if (lane == group) own = 0;
  }
  return found;
}

// Choose the experts of a row: [top_k] by ascending number. `by`, [experts], is the warp's memory.
__device__ __forceinline__ void choose(const RouteArgs& args, int row, float* by, Choice* to) {
  const int lane = threadIdx.x % 32, experts = args.experts;
  const auto exists = [=](int i) { return 32 * i + lane < experts; };
  // Loads that wait for nothing come first. A row without a request chooses as others do, then none.
  const bool idle = args.lengths != nullptr && args.lengths[row] < 0;
  float scores[kPerLane], bias[kPerLane];
  int places[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int expert = 32 * i + lane;
    scores[i] = 0.0f;
    bias[i] = args.bias != nullptr && exists(i) ? args.bias[expert] : 0.0f;
    places[i] = args.stacked != nullptr && exists(i) ? args.stacked[expert] : expert;
  }
  constexpr int kPartsAtOnce = kPerLane <= 4 ? 4 : 16 / kPerLane;  // registers for 16 logits
  const int parts = part_count(args);
#pragma unroll 1
  for (int part = 0; part < parts; part += kPartsAtOnce) {
    float more[kPartsAtOnce][kPerLane];
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; j++) {
      const int64_t of = static_cast<int64_t>(min(part + j, parts - 1)) * args.n + row;
#pragma unroll
      for (int i = 0; i < kPerLane; i++)
        more[j][i] = ptx::load_from_l2(args.logits + of * kMaxExperts + lane + 32 * i);
    }
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; j++) {
#pragma unroll
      for (int i = 0; i < kPerLane; i++)
        if (part + j < parts) scores[i] += more[j][i];
    }
  }
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i++)
    own = max(own, exists(i) ? key(scores[i]) : 0);
  const float maximum = value_of(largest(own));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    scores[i] = args.sigmoid ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - maximum);
    if (exists(i)) sum += scores[i];
  }
  sum = args.sigmoid ? 1.0f : total(sum);
  uint32_t keys[kPerLane];  // 0: cannot be chosen, or has been
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    scores[i] = scores[i] / sum;
    keys[i] = exists(i) ? key(scores[i] + bias[i]) : 0;
    if (args.groups > 1 && exists(i)) by[32 * i + lane] = scores[i] + bias[i];
  }
  if (args.groups > 1) {
    sync_warp();
    const int size = experts / args.groups;
    const uint32_t open = best_groups(args, by, size);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (!(open >> min((32 * i + lane) / size, 31) & 1)) keys[i] = 0;
    }
    sync_warp();  // the next row uses `by` again
  }
  uint32_t picked = 0;  // bit i: expert 32 i + lane
  for (int k = 0; k < args.top_k; k++) {
    uint32_t own = 0;
#pragma unroll
    for (const uint32_t key : keys)
      own = max(own, key);
    const uint32_t best = largest(own);
    int first = kMaxExperts;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; i--) {
      if (keys[i] == best) first = 32 * i + lane;
    }
    first = __reduce_min_sync(0xffffffff, first);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (32 * i + lane == first) keys[i] = 0, picked |= 1u << i;
    }
  }
  float of_picked = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    if (picked >> i & 1) of_picked += scores[i];
  }
  of_picked = args.renormalized ? total(of_picked) + (args.sigmoid ? 1e-20f : 0.0f) : 1.0f;
#pragma unroll
  for (int i = 0, rank = 0; i < kPerLane; i++) {
    const bool is = picked >> i & 1;
    const uint32_t mask = __ballot_sync(0xffffffff, is);
    if (is) {
      to[rank + __popc(mask & ((1u << lane) - 1))] = {idle ? -1 : places[i],
                                                     scores[i] / of_picked * args.scale};
    }
    rank += __popc(mask);
  }
}
