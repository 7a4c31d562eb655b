// How blocks come to the warps of a CTA: the ring of stages, what warps are told, and the copies.
#pragma once

#include "splitk_flash_attn.cuh"

// A block of an item and where it lies: what the copying warp tells the one that attends.
struct Task {
  int slot, first;  // of the item, no slot: there is nothing more; the unit's first block
  uint16_t head, unit, units;  // of the item; how many units there are
  uint16_t number, count;      // of the unit's blocks: which it is, and how many there are
  uint8_t part, parts;         // of the unit
  uint8_t left;                // units of the item, from this one on
  uint8_t k_stage, v_stage;
};

// A warp's item, while it is not known what becomes of it; at the end there may be none.
constexpr int kNoRow = -1;
struct Held {
  int row;  // the slot's number times the KV heads, plus the head's
  uint16_t unit, units;
  uint8_t part, parts;
  uint8_t left, item_units;  // units of the item, from this one on, and up to it

  __device__ __forceinline__ bool whole() const { return units == 1 && parts == 1; }
};

constexpr int kDepth = 2;  // blocks that a warp may have before it: windows are 4 copies at most

struct Shared {
  uint64_t task_barriers[kWarps * kDepth];  // what a block is is known, its copies are under way
  uint64_t k_barriers[kWarps * kDepth];     // a block's keys have landed
  uint64_t v_barriers[kWarps * kDepth];     // and its values
  uint64_t empty_barriers[kMaxStages];      // the warp is done with the stage
  Task tasks[kWarps * kDepth];
  uint32_t landing[kMaxStages];  // of a copy into a stage: barrier, plus the parity of its phase
  Held held[kWarps];
};

// Beside it and 1 KiB that the system takes, the ring is to leave room for another CTA on an SM.
static_assert(sizeof(Shared) <= 1024, "a ring has what this leaves: SHARED_BYTES of heuristics.py");

struct Ring {
  Shared& shared;
  Barriers task_barrier, k_barrier, v_barrier, empty_barrier;
  uint32_t first;
  int stages;

  __device__ __forceinline__ Ring(const SplitKFlashAttnArgs& args, Shared& shared)
      : shared(shared),
        task_barrier{in_register(ptx::smem_address(shared.task_barriers))},
        k_barrier{task_barrier[kWarps * kDepth]},
        v_barrier{task_barrier[2 * kWarps * kDepth]},
        empty_barrier{task_barrier[3 * kWarps * kDepth]},
        first(in_register(ptx::smem_address(smem))),
        stages(args.stages) {}

  __device__ __forceinline__ void initialize() const {
#pragma unroll
    for (int i = 0; i < kWarps * kDepth; i++) {
      ptx::mbarrier_init(task_barrier[i], 1);
      ptx::mbarrier_init(k_barrier[i], 1);
      ptx::mbarrier_init(v_barrier[i], 1);
    }
#pragma unroll
    for (int i = 0; i < kMaxStages; i++)
      ptx::mbarrier_init(empty_barrier[i], kArrivalsOfWarp);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t stage(int number) const {
    return first + number * kHalfBytes;
  }
};

// The values of a block: the copies that were issued before, and where they went.
struct Given {
  int issued = 0;
  RingPosition at;
};

// Blocks of items on their way to warps, item by item in turns. Lane w has what warp w is to get.
// Cached blocks do not depend on the kernels before: what the new token adds to the last block of a
// slot does not come from the cache.
struct Producer {
  const Ring& ring;
  const int window;
  int slot, head, unit, units, part, parts;  // the lane's item
  int blocks, left;                          // of the head; units of the item, and those to come
  int first, number, count = 0;              // of the unit's blocks, and the next
  int rows;                                  // cached positions from there on
  const uint8_t* from;                       // where that lies
  int given = 0;                             // blocks so far
  Given last, before_last;                   // of those
  RingPosition fill;                         // of all warps: the next stage
  int issued = 0;                            // copies

  __device__ __forceinline__ Producer(const Ring& ring, int window) : ring(ring), window(window) {}

  // All lanes.
  __device__ __forceinline__ void run(Items items) {
    const int lane = threadIdx.x % 32;
    for (bool more = true; more;) {
      more = false;
#pragma unroll 1
      for (int warp = 0; warp < kWarps; warp++) {
        if (__shfl_sync(0xffffffff, count, warp) == 0) {
          if (items.done()) continue;
          items.settle();
          if (lane == warp) {
            slot = items.slot, head = items.head, unit = items.unit, part = items.part;
            units = items.cut.units, parts = items.parts, blocks = items.cut.blocks;
            left = items.item_units;
            first = items.first_block(), number = 0;
            count = left > 1 ? unit_end() - first : items.block_count();
            rows = items.length - first * kBlock, from = items.address();
          }
          items.next();
        }
        more = true;
        RingPosition values = fill;
        values.advance(ring.stages);
        if (lane == warp) give(values);
        sync_warp();
        issued += 2;
        fill = values;
        fill.advance(ring.stages);
      }
    }
    slot = -1;
    if (lane < kWarps) post(fill);
  }

 private:
  // Tells the warp of the next block, once it is done with that of kDepth before.
  __device__ __forceinline__ void post(const RingPosition& values) {
    // Where a stage was filled anew, that was waited for already.
    if (given >= kDepth && before_last.issued + ring.stages >= issued) {
      wait_barrier(ring.empty_barrier[before_last.at.stage], before_last.at.parity);
    }
    const int place = threadIdx.x % 32 * kDepth + given % kDepth;
    Task& task = ring.shared.tasks[place];
    task.slot = slot, task.first = first, task.head = head, task.unit = unit, task.units = units;
    task.number = number, task.count = count, task.part = part, task.parts = parts;
    task.left = left;
    task.k_stage = fill.stage, task.v_stage = values.stage;
    ptx::mbarrier_arrive(ring.task_barrier[place]);
  }

  __device__ __forceinline__ void give(const RingPosition& values) {
    post(values);
    const int place = threadIdx.x % 32 * kDepth + given % kDepth;
    const uint32_t parity = given / kDepth % 2;
    const uint32_t bytes = min(rows, kBlock) * kRowBytes;
    load(fill, from, bytes, ring.k_barrier[place], parity, issued);
    load(values, from + kHalfBytes, bytes, ring.v_barrier[place], parity, issued + 1);
    before_last = last;
    last.issued = issued + 1, last.at = values;
    given++;
    from += 2 * kHalfBytes, rows -= kBlock;
    if (++number < count) return;
    first += count, number = count = 0;
    if (--left > 0) unit++, count = unit_end() - first;
  }
  __device__ __forceinline__ int unit_end() const { return (unit + 1) * blocks / units; }

  // Of a block that is only the new token's there is nothing to copy.
  __device__ __forceinline__ void load(const RingPosition& to, const uint8_t* source,
                                       uint32_t bytes, uint32_t barrier, uint32_t parity,
                                       int copy) {
    if (window < ring.stages) {
      if (copy >= window) {
        const int before = to.stage - window;
        const uint32_t landing = ring.shared.landing[before < 0 ? before + ring.stages : before];
        wait_barrier(landing & ~1u, landing & 1);
      }
      ring.shared.landing[to.stage] = barrier + parity;
    }
    if (copy >= ring.stages) wait_barrier(ring.empty_barrier[to.stage], to.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    if (bytes > 0) ptx::bulk_load_once(ring.stage(to.stage), source, bytes, barrier);
  }
};
