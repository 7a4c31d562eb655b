// What every kernel here shares: the ring of shared-memory stages between copies and consumers.
#pragma once

#include "ptx.cuh"

// Spins that would last for ever end the kernel with an error in builds with -DDEBUG_SPINS=1.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
#if DEBUG_SPINS
  const uint64_t start = ptx::globaltimer();
#endif
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
#if DEBUG_SPINS
    if (ptx::globaltimer() - start > 2'000'000'000ull) __trap();
#endif
  }
}

// A barrier that a warp arrives at as one, once all its lanes are done, counts so many arrivals.
// The race checker takes no account of __syncwarp(), so under it every lane arrives for itself.
#if RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

__device__ __forceinline__ bool arrives_for_warp() {
  return kArrivalsOfWarp == 32 || threadIdx.x % 32 == 0;
}

// The thread's lane where it matters. What depends on it is reckoned there: where that is in a
// loop, it would else be kept in registers throughout.
__device__ __forceinline__ uint32_t lane_anew() {
  return ptx::anew<uint32_t>(threadIdx.x) % 32;
}

// What lanes of a warp have written or read comes before what others do next. The race checker sees
// that only of barriers.
__device__ __forceinline__ void sync_warp() {
#if RACECHECK
  ptx::named_barrier_sync(1 + threadIdx.x / 32, 32);
#else
  __syncwarp();
#endif
}

// mbarriers that follow each other in shared memory, by their addresses.
struct Barriers {
  uint32_t first;

  __device__ __forceinline__ uint32_t operator[](int number) const { return first + 8 * number; }
};

// A launch's CTAs by what they read: the first ones HBM, the rest other memory, or nothing. CTAs
// side by side tend to be on SMs that have a way to HBM in common, so the rest are spread.
struct CtaOrder {
  int first_ones;
  int others_share;  // of the rest among all CTAs, in 2^-16, rounded up

  __device__ __forceinline__ int number() const {
    const int cta = blockIdx.x;
    const int before = cta * others_share >> 16, with = (cta + 1) * others_share >> 16;
    return with > before ? first_ones + before : cta - before;
  }
};

// What a CTA does that only fills an SM, where a launch has fewer to do than there are: waits for
// the kernels before, as all threads do, and until the next launch's CTAs have come to their SMs.
// Else two of them would come to one, and to the next launch's, and so on.
constexpr int kIdleNs = 2000;

__device__ __forceinline__ void fill_sm() {
  const uint64_t start = ptx::globaltimer();
  ptx::wait_for_dependencies();
  while (ptx::globaltimer() - start < kIdleNs)
    ptx::sleep(100);
}

// Position in a ring of `stages`: the stage, and the parity of the barrier phase that is next.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ RingPosition() {}
  __device__ __forceinline__ RingPosition(int passed, int stages)
      : stage(passed % stages), parity(passed / stages & 1) {}

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // As far as from the beginning to `by`.
  __device__ __forceinline__ void advance(const RingPosition& by, int stages) {
    stage += by.stage;
    parity ^= by.parity;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// Keeps a value of a lane in a register: in tight loops the compiler else reads parameters and
// special registers again and again. All lanes of the warp take part.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
  return __shfl_sync(0xffffffff, value, threadIdx.x % 32);
}
