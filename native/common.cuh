// Shared by kernels with a ring of shared-memory stages: barriers, ring positions, the order of
// CTAs.
#pragma once

#include "hardware.cuh"
#include "ptx.cuh"

// Wait for the phase of `parity`. With -DDEBUG_SPINS=1 a wait of two seconds traps.
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

// Arrivals that a barrier counts for a warp. One lane arrives for all after __syncwarp(); the race
// checker ignores __syncwarp(), so under it every lane arrives.
#if RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

__device__ __forceinline__ bool arrives_for_warp() {
  return kArrivalsOfWarp == 32 || threadIdx.x % 32 == 0;
}

// The thread's lane, opaque to the compiler: values that depend on it are recomputed where they are
// used, instead of being hoisted out of loops into registers.
__device__ __forceinline__ uint32_t opaque_lane() {
  return ptx::opaque<uint32_t>(threadIdx.x) % 32;
}

// __syncwarp(), or under the race checker, which sees only barriers, a barrier of the warp.
__device__ __forceinline__ void sync_warp() {
#if RACECHECK
  ptx::named_barrier_sync(1 + threadIdx.x / 32, 32);
#else
  __syncwarp();
#endif
}

// Addresses of consecutive mbarriers in shared memory.
struct Barriers {
  uint32_t first;

  __device__ __forceinline__ uint32_t operator[](int number) const { return first + 8 * number; }
};

// A barrier of the whole CTA with RACECHECK=1, else nothing. All threads call it where the race
// checker would report what is no race: between the initialisation of mbarriers and the first copies
// that complete on them, whose bytes are read; and behind a __syncthreads() (native/README.md).
__device__ __forceinline__ void sync_checked() {
#if RACECHECK
  __syncthreads();
#endif
}

// Assigns CTAs to tiers. Logical CTAs are numbered tier by tier, the local ones first. Neighbouring
// blockIdx tend to share a path to HBM, so the remote (or idle) CTAs are spread evenly over the
// grid.
struct CtaOrder {
  int local_ctas;
  int remote_share;  // remote CTAs / all CTAs in units of 2^-16, rounded up

  // Logical number of this CTA.
  __device__ __forceinline__ int number() const {
    const int cta = blockIdx.x;
    const int before = cta * remote_share >> 16, with = (cta + 1) * remote_share >> 16;
    return with > before ? local_ctas + before : cta - before;
  }
};

// Body of an idle CTA of a launch that has fewer CTAs than there are SMs: wait for predecessor
// kernels, as every thread must, and occupy the SM until the next launch's CTAs are placed. Without
// idle CTAs two CTAs of the next launch would share the free SM, and so on launch after launch.
constexpr int kIdleNs = 2000;

__device__ __forceinline__ void fill_sm() {
  const uint64_t start = ptx::globaltimer();
  ptx::wait_for_dependencies();
  while (ptx::globaltimer() - start < kIdleNs)
    ptx::sleep(100);
}

// Position in a ring: the stage, and the parity of its next barrier phase.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ RingPosition() {}
  // After `passed` stages.
  __device__ __forceinline__ RingPosition(int passed, int stages)
      : stage(passed % stages), parity(passed / stages & 1) {}

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // Advance by the distance from the start of the ring to `by`.
  __device__ __forceinline__ void advance(const RingPosition& by, int stages) {
    stage += by.stage;
    parity ^= by.parity;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// Force a value into a register; the compiler would reload parameters and special registers in
// tight loops. Called by all lanes of the warp.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
  return __shfl_sync(0xffffffff, value, threadIdx.x % 32);
}
