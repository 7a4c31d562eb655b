// How what warps leave of a KV head's parts and units comes together.
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
  constexpr int kTotals = kMostUnits / 32;
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

// Says by lane 0 for its warp, or by some lanes each for what is theirs, that some more are there
// of what there are to be so many: whether they were the last.
__device__ __forceinline__ bool arrive(int* at, int more, int all) {
  const bool last = ptx::add_in_order(at, more) == all - more;
  if (last) *at = 0;
  return last;
}

// An item that others attend to more of, and what becomes of its unit. Amid a CTA's items it goes
// through memory, and whoever is the last of a unit adds up its parts, while other warps go on. At
// the end, when copies have no use for the ring any more, all warps leave their last items there,
// and share what is to be added up. Units meet in memory: the last of a KV head adds them up.
struct Meeting {
  const SplitKFlashAttnArgs& args;
  Shared& shared;

  // Keeps what the warp's item is.
  __device__ __forceinline__ void hold(const Task& task) const {
    const uint32_t thread = ptx::anew<uint32_t>(threadIdx.x);
    sync_warp();  // what it kept before has been read
    if (thread % 32 > 0) return;
    const int row = task.slot * args.kv_heads + task.head;
    Held& held = shared.held[thread / 32];
    const uint8_t before = held.left > 1 ? held.item_units : 0;
    held = {row,
            task.unit,
            task.units,
            task.part,
            task.parts,
            task.left,
            static_cast<uint8_t>(before + 1)};
  }
  __device__ __forceinline__ Held held() const {
    sync_warp();
    return shared.held[ptx::anew<uint32_t>(threadIdx.x) / 32];
  }

  // At the end all threads of the CTA come, whether their warp holds an item or not.
  __device__ __forceinline__ void hand_over(bool holds, const State& state, bool end) const {
    const int thread = ptx::anew<uint32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    if (end) {
      if (args.max_parts == 1) return;
      if (!holds && lane == 0 && warp < kWarps) shared.held[warp].row = kNoRow;
      __syncthreads();
    }
    if (holds) {
      const Held held = shared.held[warp];
      const Row row(args, held);
      float* const near = reinterpret_cast<float*>(smem) + warp * row.size;
      leave(state, args.group, end ? near : row.part(held.unit, held.part));
      if (held.left > 1) return;
      __syncwarp();
      if (!end && held.parts > 1) {
        bool last = false;
        if (lane == 0) last = arrive(row.parts_of_unit(held.unit), 1, held.parts);
        if (!__ballot_sync(0xffffffff, last)) return;
      }
    }
    if (end) __syncthreads();
    add_up(end);
  }

 private:
  // The warp's own unit, or at the end those of all warps, of which a warp takes heads in turns.
  __device__ __forceinline__ void add_up(bool end) const {
    const int thread = ptx::anew<uint32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int step = end ? kWarps + 1 : 1;
    // Lane w looks at what warp w holds: which is the first of a unit.
    const Held lanes = shared.held[end ? min(lane, kWarps - 1) : warp];
    bool first = end ? lane < kWarps && lanes.row >= 0 : lane == 0;
#pragma unroll
    for (int i = 0; i < kWarps - 1; i++) {
      const int row = __shfl_sync(0xffffffff, lanes.row, i);
      const int unit = __shfl_sync(0xffffffff, static_cast<int>(lanes.unit), i);
      if (row == lanes.row && unit == lanes.unit && i < lane) first = false;
    }
    int head = end ? warp : 0, left = 0;
    int mine = 0, mine_head = 0;  // whose sums over a unit the lane says to be there
#pragma unroll 1
    for (uint32_t all = __ballot_sync(0xffffffff, first); all; all &= all - 1) {
      const int number = end ? __ffs(all) - 1 : warp;
      const Held of = shared.held[number];
      const Row row(args, of);
      if (end && of.parts > 1 && threadIdx.x == 0) *row.parts_of_unit(of.unit) = 0;
      if (head < args.group) {
        int holder = kInMemory;
#pragma unroll
        for (int i = 0; i < kWarps; i++) {
          const bool same = end && lanes.row == of.row && lanes.unit == of.unit;
          const int part = __shfl_sync(0xffffffff, same ? lanes.part : kInMemory, i);
          if (part == lane) holder = i;
        }
#pragma unroll 1
        for (; head < args.group; head += step) {
          if (end || of.parts > 1) {
            const Sums sums = add_parts(row, of, head, holder);
            if (row.units == 1) {
              sums.store(row.outputs(head));
            } else {
              sums.leave(row.part(of.unit, 0) + head * kPart);
            }
          }
          if (row.units == 1) continue;
          if (lane == left) mine = number, mine_head = head;
          left++;
        }
      }
      head -= args.group;
    }
    __syncwarp();
    if (left == 0) return;
    bool last = false;
    if (lane < left) {
      const Held& of = shared.held[mine];
      const Row row(args, of);
      last = of.item_units == of.units ||
             arrive(row.units_of_head(mine_head), of.item_units, of.units);
    }
    uint32_t all = __ballot_sync(0xffffffff, last);
    if (!end) {  // the heads of one unit, lane by lane
      const Row row(args, shared.held[ptx::anew<uint32_t>(threadIdx.x) / 32]);
      if (row.units <= kFewUnits) {
#pragma unroll 1
        for (int first = 0; all; first += kHeads, all >>= kHeads)
          add_few_units(row, first, all);
        return;
      }
    }
#pragma unroll 1
    for (; all; all &= all - 1) {
      const int from = __ffs(all) - 1;
      const Row row(args, shared.held[__shfl_sync(0xffffffff, mine, from)]);
      const int of_head = __shfl_sync(0xffffffff, mine_head, from);
      add_units(row, of_head).store(row.outputs(of_head));
    }
  }
};
