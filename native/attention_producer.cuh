// Producer warp: the ring of stages, tasks for the attention warps, and the copies.
#pragma once

#include "splitk_flash_attn.cuh"

// A KV block to attend to, posted by the producer warp for one attention warp.
struct Task {
  int slot, first;  // negative slot: no more tasks; first block of the item's current part
  int length;       // cached positions of the slot
  uint16_t head, split, splits;  // KV head, split, number of splits of the head
  uint16_t number, count;        // index of the block from `first` on, and their number
  uint8_t chunk, chunks;         // chunk, number of chunks of the split
  uint8_t splits_left;           // splits of the item from this one on
  uint8_t k_stage, v_stage;
};

// The current item of a warp, as the combine step needs it.
constexpr int kNoKvHead = -1;
struct ItemRecord {
  int kv_head;  // slot * kv_heads + KV head; kNoKvHead: no item
  uint16_t split, splits;
  uint8_t chunk, chunks;
  uint8_t splits_left, item_splits;  // splits of the item from this one on, and up to this one

  __device__ __forceinline__ bool whole() const { return splits == 1 && chunks == 1; }
};

// Tasks that a warp may have pending. Two suffice: a finite window is at most 4 copies, the keys
// and values of two tasks.
constexpr int kTaskDepth = 2;

constexpr int kEvenRounds = 3;  // rounds of items over the warps that are evened, at most

struct Shared {
  uint64_t task_barriers[kWarps * kTaskDepth];  // task is posted; its copies follow
  uint64_t k_barriers[kWarps * kTaskDepth];     // keys have landed
  uint64_t v_barriers[kWarps * kTaskDepth];     // values have landed
  uint64_t empty_barriers[kMaxStages];          // attention warp is done with the stage
  Task tasks[kWarps * kTaskDepth];
  uint32_t landing[kMaxStages];  // barrier of the last copy into a stage; bit 0: the phase's parity
  ItemRecord records[kWarps];
};

// With 1 KiB for this, 1 KiB for the driver and Card.ring_bytes for the ring, an SM holds two
// CTAs.
static_assert(sizeof(Shared) <= 1024,
              "the ring takes Card.ring_bytes (hardware/card.py) beside 1 KiB");

struct Ring {
  Shared& shared;
  Barriers task_barrier, k_barrier, v_barrier, empty_barrier;
  uint32_t first;
  int stages;

  __device__ __forceinline__ Ring(const SplitKFlashAttnArgs& args, Shared& shared)
      : shared(shared),
        task_barrier{in_register(ptx::smem_address(shared.task_barriers))},
        k_barrier{task_barrier[kWarps * kTaskDepth]},
        v_barrier{task_barrier[2 * kWarps * kTaskDepth]},
        empty_barrier{task_barrier[3 * kWarps * kTaskDepth]},
        first(in_register(ptx::smem_address(smem))),
        stages(args.stages) {}

  __device__ __forceinline__ void initialize() const {
#pragma unroll
    for (int i = 0; i < kWarps * kTaskDepth; i++) {
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

// The copy of a task's values: its number among the CTA's copies, and its stage in the ring.
struct IssuedBlock {
  int issued = 0;
  RingPosition at;
};

// Issues the copies of all items of a CTA. Items are assigned to free attention warps round-robin,
// and lane w keeps the item of warp w. Cached blocks do not depend on predecessor kernels: the new
// token is added in shared memory, not read from the cache.
struct Producer {
  const Ring& ring;
  const int window;
  // The lane's item
  int slot, head, split, splits, chunk, chunks;
  int blocks, splits_left;        // blocks of the head; splits of the item still to be copied
  int before = 0;                 // blocks of the slot before them
  int first, number, count = 0;   // current part: first block, next block, blocks
  int length;                     // cached positions of the slot
  const uint64_t* entry;          // of the next block in the slot's block table
  uint64_t block;                 // the entry's address, loaded one block ahead
  int64_t offset;                 // of the head in the block
  int tasks_posted = 0;           // to the lane's warp
  IssuedBlock last, before_last;  // of the last two tasks posted
  // Of the CTA
  RingPosition fill;  // the next stage
  int issued = 0;     // copies so far

  __device__ __forceinline__ Producer(const Ring& ring, int window) : ring(ring), window(window) {}

  // All lanes of the producer warp. Items are counted when four are under way, or the ring is full:
  // that delays no copy.
  __device__ __forceinline__ void run(WorkItems items) {
    const int lane = threadIdx.x % 32;
    int dealt = 0, at_a_time = kWarps + 1;  // more than kWarps: not counted yet
    for (bool more = true; more;) {
      more = false;
#pragma unroll 1
      for (int warp = 0; warp < kWarps; warp++) {
        if (at_a_time > kWarps && issued + 2 > min(kWarps + 1, ring.stages)) {
          at_a_time = items_at_a_time(dealt + items.left());
        }
        if (__shfl_sync(0xffffffff, count, warp) == 0) {
          if (items.done() || __popc(__ballot_sync(0xffffffff, count > 0)) >= at_a_time) continue;
          items.locate();
          dealt++;
          if (lane == warp) {
            const ListedItem& listed = items.listed;
            slot = listed.slot, head = listed.head, split = listed.split, chunk = items.chunk;
            splits = listed.splits, blocks = listed.blocks, before = listed.before;
            chunks = items.chunks, splits_left = listed.item_splits, length = listed.length;
            first = items.first_block(), number = 0, entry = items.entry(first);
            count = splits_left > 1 ? split_end() - first : items.block_count();
            block = chunk == 0 ? items.block : *entry;
            offset = head_offset(items.args, head);
          }
          items.next();
        }
        more = true;
        RingPosition values = fill;
        values.advance(ring.stages);
        if (lane == warp) issue(values);
        sync_warp();
        issued += 2;
        fill = values;
        fill.advance(ring.stages);
      }
    }
    slot = -1;
    if (lane < kWarps) post_task(fill);
  }

 private:
  // Items to have under way at a time, of `all`: each round of warps gets about as many. The last
  // of 8 items would else have a single warp, whose tasks pending are too few to read at the CTA's
  // share of HBM's rate. Of many items the last round matters little.
  __device__ __forceinline__ static int items_at_a_time(int all) {
    const int rounds = (all + kWarps - 1) / kWarps;
    return rounds > kEvenRounds ? kWarps : (all + rounds - 1) / rounds;
  }

  // Post the next task, once the warp is done with the one kTaskDepth tasks before.
  __device__ __forceinline__ void post_task(const RingPosition& values) {
    // No wait is needed if the stage of that task was refilled since: the refill waited.
    if (tasks_posted >= kTaskDepth && before_last.issued + ring.stages >= issued) {
      wait_barrier(ring.empty_barrier[before_last.at.stage], before_last.at.parity);
    }
    const int index = threadIdx.x % 32 * kTaskDepth + tasks_posted % kTaskDepth;
    Task& task = ring.shared.tasks[index];
    task.slot = slot, task.first = first, task.length = length;
    task.head = head, task.split = split, task.splits = splits;
    task.number = number, task.count = count, task.chunk = chunk, task.chunks = chunks;
    task.splits_left = splits_left;
    task.k_stage = fill.stage, task.v_stage = values.stage;
    ptx::mbarrier_arrive(ring.task_barrier[index]);
  }

  // Post the lane's next block, and issue the copies of its keys and values.
  __device__ __forceinline__ void issue(const RingPosition& values) {
    post_task(values);
    const int index = threadIdx.x % 32 * kTaskDepth + tasks_posted % kTaskDepth;
    const uint32_t parity = tasks_posted / kTaskDepth % 2;
    const uint32_t bytes = min(length - (first + number) * kBlock, kBlock) * kRowBytes;
    const auto* const from = reinterpret_cast<const uint8_t*>(block + offset);
    load(fill, from, bytes, ring.k_barrier[index], parity, issued);
    load(values, from + kHalfBytes, bytes, ring.v_barrier[index], parity, issued + 1);
    before_last = last;
    last.issued = issued + 1, last.at = values;
    tasks_posted++;
    if (++number == count) {
      first += count, number = count = 0;
      if (--splits_left > 0) split++, count = split_end() - first;
    }
    if (count > 0) block = *++entry;
  }
  __device__ __forceinline__ int split_end() const { return before + (split + 1) * blocks / splits; }

  // Issue copy number `copy` within the congestion window. A block with only the new token has no
  // bytes to copy.
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
