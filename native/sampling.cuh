// Sampling of a row's token: which tokens are kept, and the noise that decides among them.
//
// A token is the argmax of logit / temperature + Gumbel noise over the kept tokens, which draws it
// with its probability among them (Gumbel 1954; Maddison, Tarlow, Minka 2014). Kept are the top_k
// largest logits, then the fewest of the largest of these whose probabilities sum to top_p, and all
// that equal the smallest kept logit. dakrun/engine/sampler.py has the same in torch.
#pragma once

#include "cta_reduce.cuh"
#include "element.cuh"

// How a slot's tokens are chosen; temperature 0: the largest logit.
struct Sampling {
  float temperature;
  int top_k;  // 0: all
  float top_p;
  int padding;
  uint64_t seed;
};

// splitmix64's finaliser (Steele, Lea, Flood 2014).
__device__ __forceinline__ uint64_t mix64(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// State of the noise of all tokens at a position.
__device__ __forceinline__ uint64_t noise_state(uint64_t seed, int position) {
  return mix64(mix64(seed + kGolden) + (position + 1ull) * kGolden);
}

// Gumbel noise of a token: -log(-log(1 - v)) with v uniform in (0, 1), in steps of 2^-32.
__device__ __forceinline__ float gumbel(uint64_t state, int token) {
  const uint32_t bits = mix64(state + (token + 1ull) * kGolden) >> 32;
  return -logf(-log1pf(-(static_cast<float>(bits) + 0.5f) * 0x1p-32f));
}

// A probability relative to the largest, from its logarithm of base 2, as an integer: sums are
// exact, whatever the order of addition.
__device__ __forceinline__ uint32_t mass(float log2_probability) {
  return static_cast<uint32_t>(exp2f(log2_probability) * 0x1p31f);
}

constexpr int kProbes = 3;  // thresholds tried in one pass over the row

struct SearchParts {
  uint64_t of[kProbes][kMaxWarps];
};

// The largest threshold in [low, high) with a sum of at least `target` over the keys from it on.
// `low` has such a sum. `sum_pass(first, step, high, sums)` adds to sums[i] the amounts of a
// thread's keys in [first + i * step, high). All threads of the CTA take part.
template <class SumPass>
__device__ __forceinline__ int find_threshold(int low, int high, uint64_t target,
                                              SearchParts& parts, SumPass sum_pass) {
  uint64_t above = 0;  // sum over the keys from `high` on
#pragma unroll 1
  while (high - low > 1) {
    const int step = max(1, (high - low) / (kProbes + 1));
    uint64_t sums[kProbes] = {};
    sum_pass(low + step, step, high, sums);
    __syncthreads();  // `parts` of the pass before have been read
    int next_low = low, next_high = high;
    uint64_t next_above = above;
#pragma unroll
    for (int i = 0; i < kProbes; i++) {
      const int threshold = low + (i + 1) * step;
      const uint64_t sum =
          above +
          reduce_cta(sums[i], parts.of[i], [](uint64_t a, uint64_t b) { return a + b; });
      if (threshold >= high) continue;
      if (sum >= target) {
        next_low = threshold;
      } else if (next_high == high) {
        next_high = threshold, next_above = sum;
      }
    }
    low = next_low, high = next_high, above = next_above;
  }
  return low;
}
