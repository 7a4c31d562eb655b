// Segments of K: k_ctas CTAs of a cluster multiply one each for the same tile, and reduce their
// partial sums through distributed shared memory, always in the order of the segments.
#pragma once

#include "tiled_output.cuh"
#include "tiled_ring.cuh"

constexpr int kPassBytes = kPassTiles * kConsumers * 16;

// The first pass that the CTA reduces for the calling warp; its next ones are k_ctas apart. The CTA
// of segment (p + w) % k_ctas reduces pass p of warp w. The offset w divides the work evenly where
// a warp has fewer passes than the cluster has CTAs.
__device__ __forceinline__ int first_pass(const TiledGemmArgs& args, const CtaCoord& cta) {
  const int warp = ptx::opaque<uint32_t>(threadIdx.x) / 32;
  const int first = cta.segment - warp + quotient(warp, args.k_ctas) * args.k_ctas;
  return first < 0 ? first + args.k_ctas : first;
}

// The parities of the barrier phases that a warp waits for next.
struct SegmentParities {
  uint32_t tile = 0, landed = 0;
};

// A tile's reduction. Partial sums are exchanged where the stages are in shared memory, as
// [segments][passes of the CTA][tiles][threads]: every thread sends to the same thread of the other
// CTAs.
struct SegmentReduction {
  const SegmentBarriers& barriers;
  const uint32_t address;
  const int segment, k_ctas, sharers, sharer;
  const int first;   // the CTA's first pass, for this warp
  const int passes;  // passes that a CTA reduces for a warp, at most
  const int own;     // passes that this CTA reduces for this warp
  SegmentParities& parities;

  __device__ __forceinline__ SegmentReduction(const TiledGemmArgs& args, const CtaCoord& cta,
                                             const SegmentBarriers& barriers, uint32_t address,
                                             SegmentParities& parities)
      : barriers(barriers),
        address(address),
        segment(cta.segment),
        k_ctas(args.k_ctas),
        sharers(cta.sharers),
        sharer(cta.sharer),
        first(first_pass(args, cta)),
        passes(quotient(kPasses + args.k_ctas - 1, args.k_ctas)),
        own(first < kPasses - (passes - 1) * k_ctas ? passes : passes - 1),
        parities(parities) {}

  // Waits until every warp of all k_ctas has read the tile's last stage. Warps without outputs
  // wait, too: else they might arrive for the next tile in place of others for this one.
  __device__ __forceinline__ void drain() const {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    if (lane < k_ctas) ptx::mbarrier_arrive_cluster(barriers.drained(), rank(lane));
    wait_barrier(barriers.drained(), parities.tile);
  }

  // Sends each pass's partial sums to the CTA that reduces them.
  __device__ __forceinline__ void store_partials(const Accumulators& acc) const {
    const int warp = threadIdx.x / 32;
    const uint32_t landed = barriers.landed[warp];
    if (threadIdx.x % 32 == 0 && own > 0)
      ptx::mbarrier_arrive_expect_tx(landed, own * (k_ctas - 1) * kPassBytes / kConsumerWarps);
    int owner = segment - first, turn = 0, left = k_ctas;
    if (owner < 0) owner += k_ctas;
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      const uint32_t at_owner = ptx::in_cta(at(segment, turn), rank(owner)),
                     landed_owner = ptx::in_cta(landed, rank(owner));
#pragma unroll
      for (int i = 0; i < kPassTiles; i++) {
        const float2 a = acc.tile[0][2 * (pass * kPassTiles + i)];
        const float2 b = acc.tile[0][2 * (pass * kPassTiles + i) + 1];
        const float4 both = {a.x, a.y, b.x, b.y};
        if (owner == segment) {
          here(segment, turn)[i * kConsumers] = both;
        } else {
          ptx::store_in_cta(at_owner + i * kConsumers * 16, both, landed_owner);
        }
      }
      if (++owner == k_ctas) owner = 0;
      if (--left == 0) left = k_ctas, turn++;
    }
  }

  // Adds up the segments of this CTA's passes and stores their outputs.
  template <EpilogueKind kind>
  __device__ __forceinline__ void store(const TileEpilogue& epilogue) {
    if (own > 0) {
      wait_barrier(barriers.landed[threadIdx.x / 32], parities.landed);
      parities.landed ^= 1;
    }
    Passes<kind> all = epilogue.passes<kind>();
    all.begin();
    const Stager stager;
#pragma unroll 1
    for (int pass = first, turn = 0; pass < all.count; pass += k_ctas, turn++) {
      const Biases<1> biases(epilogue.args, epilogue.tile, pass);
      float2 acc[2 * kPassTiles] = {};
#pragma unroll 1
      for (int from_segment = 0; from_segment < k_ctas; from_segment++) {
        const float4* const from = here(from_segment, turn);
#pragma unroll
        for (int i = 0; i < kPassTiles; i++) {
          const float4 more = from[i * kConsumers];
          acc[2 * i].x += more.x, acc[2 * i].y += more.y;
          acc[2 * i + 1].x += more.z, acc[2 * i + 1].y += more.w;
        }
      }
      const uint32_t block = all.take(turn);
      stager.stage<kind>(epilogue.args, acc, biases.in(0), block);
      all.store(block, pass, all.outputs.fit_boxes(pass + 1));
    }
  }

  // Lets producers fill stages again where this warp has read partial sums, if a tile follows.
  __device__ __forceinline__ void release_stages(bool last) {
    parities.tile ^= 1;
    if (last) return;
    ptx::fence_proxy_async();  // before copies into stages
    __syncwarp();
    if (sharers == 1) {
      if (arrives_for_warp()) ptx::mbarrier_arrive(barriers.reduced());
    } else if (threadIdx.x % 32 < sharers) {
      ptx::mbarrier_arrive_cluster(barriers.reduced(), segment * sharers + threadIdx.x % 32);
    }
  }

 private:
  __device__ __forceinline__ int rank(int of_segment) const {
    return of_segment * sharers + sharer;
  }
  __device__ __forceinline__ float4* here(int of_segment, int turn) const {
    return reinterpret_cast<float4*>(smem + (at(of_segment, turn) - ptx::smem_address(smem)));
  }
  __device__ __forceinline__ uint32_t at(int of_segment, int turn) const {
    return address + (of_segment * passes + turn) * kPassBytes + threadIdx.x * 16;
  }
};
