// Prompt attention: sizes, kernel arguments, tiles of queries, and the ring of stages.
//
// Compiled once per dtype (BFLOAT16), head size (HEAD_DIM) and ring (STAGES), and with PREFIXES=1 for decode rows:
// queries of several requests attend to their common prefix, before SplitK_FlashAttn goes on.
#pragma once

#include "common.cuh"
#include "element.cuh"
#include "geometry.cuh"
#include "prompt_tile.cuh"

constexpr bool kPrefixes = PREFIXES;
constexpr int kStages = STAGES;  // of the ring
constexpr int kWarpgroup = 128;                  // threads
constexpr int kParts = WARPGROUPS;               // of a tile, each of one consumer warpgroup
constexpr int kConsumers = kParts * kWarpgroup;  // threads
constexpr int kProducerWarps = PROMPT_PRODUCER_WARPS;
constexpr int kThreads = kConsumers + 32 * kProducerWarps;
constexpr int kFirstFreeBarrier = 1 + kThreads / 32;  // sync_warp() has those before
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of a thread
constexpr int kPartRows = PROMPT_PART_ROWS;                       // rows of a part: the M of wgmma
constexpr int kBlock = KV_BLOCK;                                  // positions
constexpr int kVectors = HEAD_DIM / CHUNK;                        // of 16 bytes, in a row
constexpr int kSteps = HEAD_DIM / 16;                             // k steps of Q K^T
constexpr int kSwizzle = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;  // divides kVectors
constexpr int kHalfBytes = kBlock * HEAD_DIM * 2;  // keys or values of a KV head's block

// A stage is the keys or the values of a block: panels of 64 dimensions, [64 positions][128 bytes]
// with 128-byte swizzle, as wgmma reads them.
constexpr int kPanels = (HEAD_DIM + 63) / 64;
constexpr int kPanelBytes = kBlock * 128;
constexpr int kStageBytes = kPanels * kPanelBytes;
static_assert(kStages >= 2, "consumers read keys while they hold the values of the block before");
// Whether each producer warp has stages of its own, two or more. In a smaller ring warps share them.
constexpr bool kOwnStages = kStages % kProducerWarps == 0 && kStages >= 2 * kProducerWarps;

// Floats of a row's partial result: outputs, row_max, row_sum, padding.
constexpr int kPartial = HEAD_DIM + ATTENTION_PARTIAL_EXTRA;

// Below any score, but finite, so that 0 * kMaskedScore is 0 and not NaN.
constexpr float kMaskedScore = -1e30f;

extern __shared__ __align__(1024) uint8_t smem[];

struct PromptAttnArgs {
  const PromptTile* tiles;  // [count], long ones first
  const int* count;
  const Element* q;        // [T][kv_heads * group][HEAD_DIM], rows `stride` apart
  const uint64_t* tables;  // [slots][table_blocks]: addresses of KV blocks; with kPrefixes, bit 0
                           // says that the block has the keys and values of this layer only
  Element* out;            // [T][kv_heads * group][HEAD_DIM]
  float* partials;         // [rows of all splits][kv_heads][kPartial]
  int* arrivals;           // zero between launches
  int64_t stride;
  int64_t layer_offset;  // bytes from a block's address to this layer's part of it
  int64_t head_bytes;    // bytes from KV head to KV head
  int table_blocks, kv_heads, group;
  int part_queries;  // of a part: kPartRows / group
  int ctas;
  float scale;  // of the scores, times log2(e), for exp2
  // With kPrefixes, in place of `out`
  const int* lengths;       // [T]: positions of queries, which are not rotated yet; may be < 0
  const float2* rotations;  // [positions][HEAD_DIM / 2] (cos, sin), or null
  float* results;           // [T][kv_heads * group][kPartial]
};

// Iterator over the tiles and KV heads of a CTA. Rounds deal them out in alternating direction:
// whoever gets the longest of one round gets the shortest of the next.
struct WorkItems {
  const PromptAttnArgs& args;
  const int count;
  PromptTile tile;
  int head;
  int round = -1;  // of the current item

  __device__ __forceinline__ explicit WorkItems(const PromptAttnArgs& args)
      : args(args), count(*args.count * args.kv_heads) {}

  __device__ __forceinline__ bool next() {
    round++;
    const int cta = blockIdx.x;
    const int item = round * args.ctas + (round % 2 ? args.ctas - 1 - cta : cta);
    if (item >= count) return false;
    tile = args.tiles[item / args.kv_heads];
    head = item % args.kv_heads;
    return true;
  }
};

struct Shared {
  uint64_t full_barriers[kStages], empty_barriers[kStages];
  int last[kParts];  // whether the part's partial result was the last to arrive
};

struct Ring {
  Barriers full_barrier, empty_barrier;
  uint32_t first;

  __device__ __forceinline__ explicit Ring(Shared& shared)
      : full_barrier{in_register(ptx::smem_address(shared.full_barriers))},
        empty_barrier{full_barrier[kStages]},
        first(in_register(ptx::smem_address(smem))) {}

  __device__ __forceinline__ void initialize() const {
#pragma unroll
    for (int i = 0; i < kStages; i++) {
      ptx::mbarrier_init(full_barrier[i], kArrivalsOfWarp);
      ptx::mbarrier_init(empty_barrier[i], kConsumers / 32 * kArrivalsOfWarp);
    }
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ uint32_t stage(int number) const {
    return first + number * kStageBytes;
  }
  __device__ __forceinline__ void wait_full(const RingPosition& at) const {
    wait_barrier(full_barrier[at.stage], at.parity);
  }
  // Called by all lanes of a consumer warp that has read the stage.
  __device__ __forceinline__ void release(const RingPosition& at) const {
    sync_warp();
    if (arrives_for_warp()) ptx::mbarrier_arrive(empty_barrier[at.stage]);
  }
};
