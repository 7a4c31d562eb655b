// Memory reads without computation, in the access pattern of the GEMM and attention kernels, with
// which `dakrun profile` measures memory tiers.
//
//   for each CTA, one thread:
//     keep `stages` bulk copies of `chunk` bytes in flight through a ring in shared memory
//
// read_window reads several tiers side by side for a given time, each by its own CTAs.
// read_multicast reads each chunk once per cluster and multicasts it to all its CTAs.
// read_once reads a buffer once, as one op of a chain of launches.

#include "common.cuh"

constexpr int kMaxSources = BANDWIDTH_MAX_SOURCES;
constexpr int kMaxStages = BANDWIDTH_MAX_STAGES;

extern __shared__ __align__(128) uint8_t smem[];

struct Source {
  const uint8_t* base;
  uint64_t bytes;
  int ctas;
  int chunk;    // bytes, a multiple of 16
  int stages;   // at most kMaxStages
  int sharers;  // CTAs that read the same chunks
};

struct ReadWindowArgs {
  Source sources[kMaxSources];  // CTAs are numbered source by source
  uint64_t window_ns;
  unsigned long long* bytes;  // [kMaxSources]: bytes read from each source
  unsigned long long* span;   // [2]: start of the first CTA, end of the last, in ns
};

// Read all sources side by side for `window_ns`.
extern "C" __global__ void __launch_bounds__(32)
    read_window(const __grid_constant__ ReadWindowArgs args) {
  __shared__ uint64_t barriers[kMaxStages];
  if (threadIdx.x != 0) return;
  const Barriers full_barrier = {ptx::smem_address(barriers)};
  const uint32_t ring = ptx::smem_address(smem);
  int id = blockIdx.x, number = 0;
  while (id >= args.sources[number].ctas)
    id -= args.sources[number++].ctas;
  const Source source = args.sources[number];

  for (int i = 0; i < source.stages; i++)
    ptx::mbarrier_init(full_barrier[i], 1);
  ptx::fence_mbarrier_init();
  ptx::fence_proxy_async();

  const uint64_t chunks = source.bytes / source.chunk;
  const uint64_t step = (source.ctas + source.sharers - 1) / source.sharers;
  uint64_t next = id / source.sharers;
  auto load = [&](int stage) {
    ptx::mbarrier_arrive_expect_tx(full_barrier[stage], source.chunk);
    ptx::bulk_load(ring + stage * source.chunk, source.base + next * source.chunk, source.chunk,
                   full_barrier[stage]);
    next += step;
    if (next >= chunks) next -= chunks;
  };

  const uint64_t start = ptx::globaltimer();
  uint64_t end = start, read = 0;
  for (int stage = 0; stage < source.stages; stage++)
    load(stage);
  RingPosition at;
  while (true) {
    wait_barrier(full_barrier[at.stage], at.parity);
    read += source.chunk;
    end = ptx::globaltimer();
    if (end - start >= args.window_ns) break;
    load(at.stage);
    at.advance(source.stages);
  }
  // Drain: a CTA may not exit while copies into its shared memory are in flight.
  for (int i = 1; i < source.stages; i++) {
    at.advance(source.stages);
    wait_barrier(full_barrier[at.stage], at.parity);
  }
  atomicAdd(&args.bytes[number], read);
  atomicMin(&args.span[0], start);
  atomicMax(&args.span[1], end);
}

#if CLUSTERS

struct ReadMulticastArgs {
  const uint8_t* base;
  uint64_t bytes;
  int chunk;
  int stages;
  int chunks;  // per cluster
};

// Every cluster reads its own chunks once; its leader multicasts them to all its CTAs.
extern "C" __global__ void __launch_bounds__(32)
    read_multicast(const __grid_constant__ ReadMulticastArgs args) {
  __shared__ uint64_t barriers[2 * kMaxStages];
  const Barriers full_barrier = {ptx::smem_address(barriers)};
  const Barriers empty_barrier = {full_barrier[kMaxStages]};
  const uint32_t ring = ptx::smem_address(smem);
  const uint32_t size = ptx::cluster_size(), rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; i++) {
      ptx::mbarrier_init(full_barrier[i], 1);
      ptx::mbarrier_init(empty_barrier[i], size);
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();  // no CTA arrives at a barrier before it is initialised
  if (threadIdx.x == 0) {
    const uint64_t total = args.bytes / args.chunk;
    const uint16_t everyone = static_cast<uint16_t>((1u << size) - 1);
    uint64_t next = blockIdx.x / size;
    const uint64_t step = gridDim.x / size;
    // A CTA offers a stage once it expects the next bytes there. The leader waits for all CTAs.
    auto offer = [&](int stage) {
      ptx::mbarrier_arrive_expect_tx(full_barrier[stage], args.chunk);
      ptx::mbarrier_arrive_cluster(empty_barrier[stage], 0);
    };
    const int ahead = min(args.stages, args.chunks);
    for (int stage = 0; stage < ahead; stage++)
      offer(stage);
    RingPosition fill, drain;
    for (int done = 0, issued = 0; done < args.chunks; done++) {
      for (; rank == 0 && issued < min(args.chunks, done + args.stages); issued++) {
        wait_barrier(empty_barrier[fill.stage], fill.parity);
        ptx::bulk_load_multicast(ring + fill.stage * args.chunk, args.base + next * args.chunk,
                                 args.chunk, full_barrier[fill.stage], everyone);
        next += step;
        if (next >= total) next -= total;
        fill.advance(args.stages);
      }
      wait_barrier(full_barrier[drain.stage], drain.parity);
      if (done + args.stages < args.chunks) offer(drain.stage);
      drain.advance(args.stages);
    }
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();  // no CTA exits while others copy into it or arrive at its barriers
}

#endif

struct ReadOnceArgs {
  const uint8_t* base;
  uint64_t bytes;  // a multiple of chunk; may be 0
  int chunk;
  int stages;
  uint32_t* sink;  // [gridDim.x]
};

// Read `bytes` once. Loads start before the predecessor kernel ends; the write to `sink`, as
// anything that depends on the predecessor, waits.
extern "C" __global__ void __launch_bounds__(64)
    read_once(const __grid_constant__ ReadOnceArgs args) {
  __shared__ uint64_t barriers[2 * kMaxStages];
  const Barriers full_barrier = {ptx::smem_address(barriers)};
  const Barriers empty_barrier = {full_barrier[kMaxStages]};
  const uint32_t ring = ptx::smem_address(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; i++) {
      ptx::mbarrier_init(full_barrier[i], 1);
      ptx::mbarrier_init(empty_barrier[i], 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::launch_dependents();
  const uint64_t chunks = args.bytes / args.chunk;
  RingPosition at;
  if (threadIdx.x == 0) {
    at.parity = 1;  // the phase before the first counts as complete: all stages start empty
    for (uint64_t i = blockIdx.x; i < chunks; i += gridDim.x) {
      wait_barrier(empty_barrier[at.stage], at.parity);
      ptx::mbarrier_arrive_expect_tx(full_barrier[at.stage], args.chunk);
      ptx::bulk_load(ring + at.stage * args.chunk, args.base + i * args.chunk, args.chunk,
                     full_barrier[at.stage]);
      at.advance(args.stages);
    }
    ptx::wait_for_dependencies();
  } else if (threadIdx.x == 32) {
    ptx::wait_for_dependencies();
    uint32_t sum = 0;
    for (uint64_t i = blockIdx.x; i < chunks; i += gridDim.x) {
      wait_barrier(full_barrier[at.stage], at.parity);
      sum += *reinterpret_cast<volatile uint32_t*>(smem + at.stage * args.chunk);
      ptx::mbarrier_arrive(empty_barrier[at.stage]);
      at.advance(args.stages);
    }
    args.sink[blockIdx.x] = sum;
  } else {
    ptx::wait_for_dependencies();
  }
}
