// Outputs of a part: stored, or as partial results of splits, which the last to arrive combines.
#pragma once

#include "prompt_softmax.cuh"

// Store a thread's row `i` as a partial result: unnormalized outputs, row_max, row_sum.
__device__ __forceinline__ void store_row(const Accumulators& acc, int i, float* to) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = i; j < kStored; j += 2)
    *reinterpret_cast<float2*>(to + j / 2 * 8 + 2 * t) = acc.outputs[j];
  if (t == 0) *reinterpret_cast<float2*>(to + HEAD_DIM) = {acc.row_max[i], acc.row_sum[i]};
}

// Number of a query head of the item's KV head, of token `query` of the tile, among all heads.
__device__ __forceinline__ int64_t head_number(const PromptAttnArgs& args, const WorkItems& items,
                                               int query, int head) {
  const int64_t token = items.tile.row + query;
  return (token * args.kv_heads + items.head) * args.group + head;
}

// Store the outputs of an item that covers all positions of its queries.
__device__ __forceinline__ void store(const PromptAttnArgs& args, const WorkItems& items,
                                      const Part& part, const Accumulators& acc) {
  const int64_t stride = static_cast<int64_t>(args.kv_heads) * args.group * HEAD_DIM;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (part.row[i] >= part.rows) continue;
    if (kPrefixes) {
      const int64_t number = head_number(args, items, part.query[i], part.head[i]);
      store_row(acc, i, args.results + number * kPartial);
      continue;
    }
    const float scale = 1.0f / acc.row_sum[i];
    Element* const out = args.out + part.offset(args, items, i, stride) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = i; j < kStored; j += 2)
      *reinterpret_cast<uint32_t*>(out + j / 2 * 8) =
          packed(scale * acc.outputs[j].x, scale * acc.outputs[j].y);
  }
}

// Partial result of a row of a part in a split: outputs, row_max, row_sum.
__device__ __forceinline__ float* partial(const PromptAttnArgs& args, const WorkItems& items,
                                          const Part& part, int split, int row) {
  const PromptTile& tile = items.tile;
  const int64_t number =
      tile.partial + (split * tile.queries + part.first_query) * args.group + row;
  return args.partials + (number * args.kv_heads + items.head) * kPartial;
}

__device__ __forceinline__ void store_partial(const PromptAttnArgs& args, const WorkItems& items,
                                              const Part& part, const Accumulators& acc) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (part.row[i] >= part.rows) continue;
    store_row(acc, i, partial(args, items, part, items.tile.split, part.row[i]));
  }
}

// Combine the splits of a part, in order. A warp has four rows at a time, and loads eight splits of
// them together: each round trip takes most of a microsecond. A lane has four dimensions of every
// row; of row_max and row_sum it has those of row lane / 8 and split lane % 8.
constexpr int kRowsAtOnce = 4, kSplitsAtOnce = 8;

__device__ __forceinline__ void combine(const PromptAttnArgs& args, const WorkItems& items,
                                        const Part& part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  const int splits = items.tile.splits, dimension = min(4 * lane, HEAD_DIM - 4);
#pragma unroll 1
  for (int row = warp * kRowsAtOnce; row < part.rows; row += kWarpgroup / 32 * kRowsAtOnce) {
    float row_max = kMaskedScore, row_sum = 0.0f;
    float4 values[kRowsAtOnce] = {};
#pragma unroll 1
    for (int from = 0; from < splits; from += kSplitsAtOnce) {
      const auto result = [&](int i, int split) {
        return partial(args, items, part, min(from + split, splits - 1),
                       min(row + i, part.rows - 1));
      };
      const float* const own = result(lane / kSplitsAtOnce, lane % kSplitsAtOnce);
      float2 stats = ptx::load_from_l2(reinterpret_cast<const float2*>(own + HEAD_DIM));
      float4 more[kRowsAtOnce][kSplitsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; i++) {
#pragma unroll
        for (int split = 0; split < kSplitsAtOnce; split++) {
          const float* const at = result(i, split) + dimension;
          more[i][split] =
              ptx::load_from_l2_or_zero(reinterpret_cast<const float4*>(at), from + split < splits);
        }
      }
      if (from + lane % kSplitsAtOnce >= splits) stats = {kMaskedScore, 0.0f};
      float larger = fmaxf(row_max, stats.x);
#pragma unroll
      for (int distance = 1; distance < kSplitsAtOnce; distance *= 2)
        larger = fmaxf(larger, __shfl_xor_sync(0xffffffff, larger, distance));
      const float before = ptx::exp2(row_max - larger), factor = ptx::exp2(stats.x - larger);
      float sum = stats.y * factor;
#pragma unroll
      for (int distance = 1; distance < kSplitsAtOnce; distance *= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      row_max = larger, row_sum = row_sum * before + sum;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; i++) {
        const float kept = __shfl_sync(0xffffffff, before, i * kSplitsAtOnce);
        float4& value = values[i];
        value = {value.x * kept, value.y * kept, value.z * kept, value.w * kept};
#pragma unroll
        for (int split = 0; split < kSplitsAtOnce; split++) {
          const float by = __shfl_sync(0xffffffff, factor, i * kSplitsAtOnce + split);
          value.x += by * more[i][split].x, value.y += by * more[i][split].y;
          value.z += by * more[i][split].z, value.w += by * more[i][split].w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; i++) {
      const float sum = __shfl_sync(0xffffffff, row_sum, i * kSplitsAtOnce);
      const float largest = __shfl_sync(0xffffffff, row_max, i * kSplitsAtOnce);
      if (row + i >= part.rows || 4 * lane >= HEAD_DIM) continue;
      const int query = part.first_query + (row + i) / args.group, head = (row + i) % args.group;
      const int64_t number = head_number(args, items, query, head);
      if (kPrefixes) {
        float* const to = args.results + number * kPartial;
        *reinterpret_cast<float4*>(to + dimension) = values[i];
        if (lane == 0) *reinterpret_cast<float2*>(to + HEAD_DIM) = {largest, sum};
        continue;
      }
      const float scale = 1.0f / sum;
      Element* const to = args.out + number * HEAD_DIM + dimension;
      uint32_t* const out = reinterpret_cast<uint32_t*>(to);
      out[0] = packed(scale * values[i].x, scale * values[i].y);
      out[1] = packed(scale * values[i].z, scale * values[i].w);
    }
  }
}

// Store a part's outputs. Of splits, the last to arrive combines them. Called by a warpgroup.
__device__ __forceinline__ void finish(const PromptAttnArgs& args, const WorkItems& items,
                                       const Part& part, int number, Shared& shared,
                                       Accumulators& acc) {
  const PromptTile& tile = items.tile;
  acc.complete();
  if (tile.splits == 1) return store(args, items, part, acc);
  store_partial(args, items, part, acc);
  const int warpgroup = threadIdx.x / kWarpgroup, barrier = kFirstFreeBarrier + warpgroup;
  ptx::named_barrier_sync(barrier, kWarpgroup);
  if (threadIdx.x % kWarpgroup == 0) {
    int* const at = args.arrivals + tile.arrivals + items.head * kParts + number;
    // acq_rel at gpu scope: the warpgroup's partial results, ordered before by the barrier, are
    // visible to the last arrival, which resets the counter.
    const bool last = ptx::atomic_add_acq_rel(at, 1) == tile.splits - 1;
    if (last) *at = 0;
    shared.last[warpgroup] = last;
  }
  ptx::named_barrier_sync(barrier, kWarpgroup);
  if (shared.last[warpgroup]) combine(args, items, part);
}
