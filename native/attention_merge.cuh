// Where what warps leave of a KV head's parts and units meets: who adds it up, and when.
#pragma once

#include "attention_sums.cuh"

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
