// The experts of a row, chosen by a warp from their logits.
#pragma once

#include "cta_reduce.cuh"
#include "route_pairs.cuh"

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

// The number of the lane with the largest key; the first such lane if several have it.
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

// The logits of the lane's experts, those of all parts: sums in order. Leaves them unwritten.
__device__ __forceinline__ void sum_parts(const RouteArgs& args, int row, float (&sums)[kPerLane]) {
  constexpr int kVectors = kPerLane / 4, kAtOnce = 4 / kVectors;  // registers for 16 logits
  // Logits come in sixteens of experts, those that do not exist included.
  const int written = ceil_div(args.experts, ROUTE_EXPERTS) * ROUTE_EXPERTS;
  const int parts = kPerLane * (threadIdx.x % 32) < written ? part_count(args) : 0;
  const int64_t part_size = static_cast<int64_t>(args.n) * kVectors * 32;
  float4* from = reinterpret_cast<float4*>(args.logits) +
                 (static_cast<int64_t>(row) * 32 + threadIdx.x % 32) * kVectors;
#pragma unroll
  for (float& sum : sums)
    sum = 0.0f;
#pragma unroll 1
  for (int part = 0; part < parts; part += kAtOnce) {
    float4 more[kAtOnce][kVectors];
    for (uint32_t most = kUnwritten; most == kUnwritten;) {
#pragma unroll
      for (int i = 0; i < kAtOnce * kVectors; i++) {
        more[i / kVectors][i % kVectors] = ptx::load_from_l2_or_zero(
            from + i / kVectors * part_size + i % kVectors, part + i / kVectors < parts);
      }
      most = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce * kVectors; i++)
        most = max(most, largest_word(more[i / kVectors][i % kVectors]));
      if (most == kUnwritten) ptx::spin();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce * kVectors; i++) {
      const float4 logits = more[i / kVectors][i % kVectors];
      float* const to = sums + i % kVectors * 4;
      to[0] += logits.x, to[1] += logits.y, to[2] += logits.z, to[3] += logits.w;
      if (part + i / kVectors < parts)
        set_unwritten(from + i / kVectors * part_size + i % kVectors);
    }
    from += kAtOnce * part_size;
  }
}

// Choose the experts of row `first` + `number`: [top_k] by ascending number, from pair `pair` on.
// `by`, [experts], is the warp's memory.
__device__ __forceinline__ void choose(const RouteArgs& args, int first, int number, float* by,
                                       const PairOrder& order, int pair) {
  const int lane = threadIdx.x % 32, experts = args.experts, own_first = kPerLane * lane;
  const int row = first + number;
  const auto exists = [=](int i) { return own_first + i < experts; };
  // Loads that wait for nothing come first. A row without a request computes, too, and chooses none.
  const bool idle = args.lengths != nullptr && args.lengths[row] < 0;
  float bias[kPerLane];
  int indices[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int expert = own_first + i;
    bias[i] = args.bias != nullptr && exists(i) ? args.bias[expert] : 0.0f;
    indices[i] = args.stacked != nullptr && exists(i) ? args.stacked[expert] : expert;
  }
  float scores[kPerLane];
  sum_parts(args, row, scores);
  if (args.sigmoid) {
#pragma unroll
    for (float& score : scores)
      score = 1.0f / (1.0f + expf(-score));
  } else {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      const uint32_t more = key(scores[i]);
      own = max(own, exists(i) ? more : 0);
    }
    const float maximum = value_of(largest(own));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      scores[i] = expf(scores[i] - maximum);
      sum += exists(i) ? scores[i] : 0.0f;
    }
    const float factor = 1.0f / total(sum);
#pragma unroll
    for (float& score : scores)
      score *= factor;
  }
  uint32_t keys[kPerLane];  // 0: cannot be chosen, or has been
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const uint32_t found = key(scores[i] + bias[i]);
    keys[i] = exists(i) ? found : 0;
  }
  if (args.groups > 1) {
#pragma unroll
    for (int i = 0; i < kPerLane; i++)
      if (exists(i)) by[own_first + i] = scores[i] + bias[i];
    sync_warp();
    const int size = experts / args.groups;
    const uint32_t open = best_groups(args, by, size);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (!(open >> min((own_first + i) / size, 31) & 1)) keys[i] = 0;
    }
    sync_warp();  // the next row uses `by` again
  }
  uint32_t picked = 0;  // bit i: the lane's expert number i
  const uint32_t before = (1u << lane) - 1;  // lanes
  uint32_t own = *keys;                      // the lane's largest
#pragma unroll
  for (const uint32_t key : keys)
    own = max(own, key);
  for (int k = 0; k < args.top_k; k++) {
    // While the lanes are compared: the lane's first expert of the largest key, and the key after.
    uint32_t first = 0, after = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      const bool is_first = first == 0 && keys[i] == own;
      first |= is_first ? 1u << i : 0;
      after = max(after, is_first ? 0 : keys[i]);
    }
    const bool is_best = own == largest(own);
    if (!(__ballot_sync(0xffffffff, is_best) & before) && is_best) {
      picked |= first, own = after;
#pragma unroll
      for (int i = 0; i < kPerLane; i++)
        keys[i] = first >> i & 1 ? 0 : keys[i];
    }
  }
  float of_picked = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    if (picked >> i & 1) of_picked += scores[i];
  }
  float scale = args.scale;
  if (args.renormalized) scale /= total(of_picked) + (args.sigmoid ? 1e-20f : 0.0f);
  // Behind those of chosen experts before the lane's.
#pragma unroll
  for (int i = 0; i < kPerLane; i++)
    pair += __popc(__ballot_sync(0xffffffff, picked >> i & 1) & before);
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    if (picked >> i & 1) {
      const int index = idle ? -1 : indices[i];
      order.set(pair++, {static_cast<short>(index), static_cast<short>(number), scores[i] * scale});
    }
  }
}
