// The logits of a row as its grammar has them.
#pragma once

#include "row_logits.cuh"
#include "sampling.cuh"

constexpr int kPollNs = 500;  // between looks at a counter in host memory

// Integer that orders like a float; both zeros map to the same.
__device__ __forceinline__ uint32_t in_order(float value) {
  const uint32_t bits = reinterpret_cast<const uint32_t&>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  return 0x80000000 + (bits & 0x80000000 ? 0 - magnitude : magnitude);
}
constexpr uint32_t kMinusInfinity = 0x80000000 - 0x7f800000;

// Logits of tokens whose bits are set in `visible`.
struct AdjustedLogits {
  using Key = uint32_t;
  static constexpr Key kLowest = 0;
  Row row;
  const uint32_t* visible;  // [words(row.size)], in shared memory; bits past the row are 0

  __device__ __forceinline__ static int words(int size) { return (size + 31) / 32; }

  // Call use(key, logit, token) for all logits of a thread that have a key of at least `least`.
  template <class Use>
  __device__ __forceinline__ void for_each(Key least, Use use) const {
    row.for_each_chunk([&](const uint4& chunk, int number) {
      const int first = row.first_token(number);
      const uint32_t seen = bits_from(first);
      if (seen == 0 || in_order(logit_of(largest(chunk))) < least) return;
      for_each_of(chunk, first, [&](uint32_t bits, int token) {
        const float logit = unpacked(bits).x;
        if (seen >> (token - first) & 1) use(in_order(logit), logit, token);
      });
    });
  }

 private:
  // Bits of the tokens of a chunk.
  __device__ __forceinline__ uint32_t bits_from(int token) const {
    const int word = token >> 5;
    const uint32_t low = word >= 0 ? visible[word] : 0;
    const uint32_t high = word + 1 < words(row.size) ? visible[word + 1] : 0;
    return (static_cast<uint64_t>(high) << 32 | low) >> (token & 31) & ((1 << kLogits) - 1);
  }
};

// Wait until the row's mask for `position` is in host memory. All threads of the CTA take part.
__device__ __forceinline__ void wait_for_mask(const Sampling& sampling, int position) {
  const uint32_t wanted = static_cast<uint32_t>(sampling.mask_base + position);
  if (threadIdx.x == 0) {
    while (static_cast<uint32_t>(ptx::load_acquire_sys(sampling.ready)) < wanted)
      ptx::sleep(kPollNs);
  }
  __syncthreads();
}

// The token of a row with a grammar for `position`: of its vocabulary, or NO_TOKEN, or NONE_ALLOWED.
// Not inlined, so that other rows do not pay for its registers. All threads of the CTA take part,
// and get the token. `visible` is shared memory for AdjustedLogits.
__device__ __noinline__ int choose_adjusted(Row row, const Sampling& sampling, int position,
                                            uint32_t* visible) {
  __shared__ SearchParts parts;
  wait_for_mask(sampling, position);
  const int words = AdjustedLogits::words(row.size);
  for (int i = threadIdx.x; i < words; i += kThreads) {
    const int bits = min(row.size - 32 * i, 32);
    visible[i] = sampling.mask[i] & ~0u >> (32 - bits);
  }
  __syncthreads();
  const AdjustedLogits logits{row, visible};
  uint64_t rank = 0;  // of the thread's largest logit: larger key first, then smaller token
  logits.for_each(0, [&](uint32_t key, float, int token) {
    rank = max(rank, static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(token));
  });
  rank = reduce_cta(rank, parts.of[0], [](uint64_t a, uint64_t b) { return max(a, b); });
  if (rank == 0) return NONE_ALLOWED;
  const uint32_t best = rank >> 32;
  const int first = ~static_cast<uint32_t>(rank);
  if (best == kMinusInfinity) return NO_TOKEN;
  if (sampling.temperature == 0.0f) return first;
  const float largest_logit = unpacked(row.logits[first]).x;
  __syncthreads();  // `parts` has been read
  return sample(logits, best, largest_logit, sampling, position, parts);
}
