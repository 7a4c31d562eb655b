// Reads memory tiers the way the product's kernels do, with nothing but the reads: what a profile
// is measured with. One thread of a CTA keeps `stages` bulk copies of `chunk` bytes in flight.

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
  int sharers;  // this many CTAs read the same chunks
};

struct ReadWindowArgs {
  Source sources[kMaxSources];  // CTAs are numbered source after source
  uint64_t window_ns;
  unsigned long long* bytes;  // [kMaxSources]: read of each source
  unsigned long long* span;   // [2]: start of the first CTA, end of the last, in ns
};

// All sources side by side for `window_ns`, each by its own CTAs.
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
  for (int i = 1; i < source.stages;
       i++) {  // a CTA may not exit while copies into it are on their way
    at.advance(source.stages);
    wait_barrier(full_barrier[at.stage], at.parity);
  }
  atomicAdd(&args.bytes[number], read);
  atomicMin(&args.span[0], start);
  atomicMax(&args.span[1], end);
}

struct ReadMulticastArgs {
  const uint8_t* base;
  uint64_t bytes;
  int chunk;
  int stages;
  int chunks;  // that each cluster reads
};

// Every cluster reads chunks of its own, once, and its leader has them written to all its CTAs.
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
  ptx::cluster_wait();  // nobody may arrive at a barrier that is not initialised yet
  if (threadIdx.x == 0) {
    const uint64_t total = args.bytes / args.chunk;
    const uint16_t everyone = static_cast<uint16_t>((1u << size) - 1);
    uint64_t next = blockIdx.x / size;
    const uint64_t step = gridDim.x / size;
    // A stage is free in a CTA once it expects the next bytes: the leader waits for all of them.
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
  ptx::cluster_wait();  // copies and arrivals go to other CTAs: all stay until all are done
}

struct ReadOnceArgs {
  const uint8_t* base;
  uint64_t bytes;  // a multiple of chunk; 0 for a kernel that does nothing
  int chunk;
  int stages;
  uint32_t* sink;  // [gridDim.x]
};

// One op of a chain: reads `bytes` once. Its loads start before the op ahead has ended; what
// depends on it, here the write to `sink`, waits.
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
    at.parity = 1;  // of an empty barrier's phase before the first: the stages start free
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
