// Sampling of a row's token: which tokens are kept, and the noise that decides among them.
//
// A token is the argmax of logit / temperature + Gumbel noise over the kept tokens, which draws it
// with its probability among them (Gumbel 1954; Maddison, Tarlow, Minka 2014). Kept are the top_k
// largest logits, then the fewest of the largest of these whose probabilities sum to top_p, and all
// that equal the smallest kept logit; of these, tokens of at least min_p of the likeliest one's
// probability. dakrun/engine/sampler.py has the same in torch.
#pragma once

#include "cta_reduce.cuh"
#include "row_logits.cuh"

// How a slot's tokens are chosen; temperature 0: the largest logit.
struct Sampling {
  float temperature;
  int top_k;  // 0: all
  float top_p;
  int mask_base;
  uint64_t seed;
  // Of a row with a grammar, else null; in host memory. Bit `token % 32` of mask[token / 32] says
  // whether the grammar allows the token at position p, once *ready is at least mask_base + p. Both
  // are compared as unsigned, so that -1 ends every wait.
  const uint32_t* mask;  // [ceil(vocabulary / 32)]
  const int* ready;
  struct Adjustments* adjustments;  // of adjusted_logits.cuh, or null
  float log_min_p;                  // -infinity: min-p keeps all
  int padding;
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
// thread's keys in [first + i * step, high). All threads of the CTA take part. high - low and the
// thresholds up to high + 2 * step must be of type Key.
template <class Key, class SumPass>
__device__ __forceinline__ Key find_threshold(Key low, Key high, uint64_t target,
                                              SearchParts& parts, SumPass sum_pass) {
  uint64_t above = 0;  // sum over the keys from `high` on
#pragma unroll 1
  while (high - low > 1) {
    const Key step = max(static_cast<Key>(1), (high - low) / (kProbes + 1));
    uint64_t sums[kProbes] = {};
    sum_pass(low + step, step, high, sums);
    __syncthreads();  // `parts` of the pass before have been read
    Key next_low = low, next_high = high;
    uint64_t next_above = above;
#pragma unroll
    for (int i = 0; i < kProbes; i++) {
      const Key threshold = low + (i + 1) * step;
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

// The token of a row, drawn for `position`; its largest logit has the key `best`. All threads of
// the CTA take part, and get it.
template <class Logits>
__device__ __forceinline__ int sample(const Logits& logits, typename Logits::Key best,
                                      float largest_logit, const Sampling& sampling, int position,
                                      SearchParts& parts) {
  using Key = typename Logits::Key;
  const float scale = 1.0f / fmaxf(sampling.temperature, 1e-30f);
  Key least = Logits::kLowest;  // of the kept keys
  if (sampling.top_k > 0 && sampling.top_k < logits.row.size) {
    least = find_threshold(least, best + 1, sampling.top_k, parts,
                           [&](Key first, Key step, Key high, uint64_t (&sums)[kProbes]) {
                             logits.for_each(first, high, [&](Key key, float, int) {
#pragma unroll
                               for (int i = 0; i < kProbes; i++)
                                 sums[i] += key >= first + i * step && key < high;
                             });
                           });
  }
  if (sampling.top_p < 1.0f) {
    const float log2_scale = 1.4426950408889634f * scale;  // times log2(e)
    const auto add = [&](Key first, Key step, Key high, uint64_t (&sums)[kProbes]) {
      logits.for_each(first, high, [&](Key key, float logit, int) {
        if (key < first || key >= high) return;
        const uint32_t amount = mass((logit - largest_logit) * log2_scale);
#pragma unroll
        for (int i = 0; i < kProbes; i++)
          if (key >= first + i * step) sums[i] += amount;
      });
    };
    uint64_t total[kProbes] = {};
    add(least, 0, best + 1, total);
    __syncthreads();  // `parts` of a search before have been read
    const auto plus = [](uint64_t a, uint64_t b) { return a + b; };
    const double sum = reduce_cta(total[0], parts.of[0], plus);
    // Rounded up: a sum is at least the target if it is at least the next integer.
    const uint64_t target = static_cast<uint64_t>(ceil(sampling.top_p * sum));
    least = find_threshold(least, best + 1, target, parts, add);
  }
  const uint64_t state = noise_state(sampling.seed, position);
  uint64_t rank = 0;  // of the thread's token: larger score first, then smaller token
  logits.for_each(least, best + 1, [&](Key key, float logit, int token) {
    const float log_probability = (logit - largest_logit) * scale;  // relative to the largest
    if (key < least || log_probability < sampling.log_min_p) return;
    const float score = log_probability + gumbel(state, token);
    const uint32_t bits = reinterpret_cast<const uint32_t&>(score);
    const uint32_t ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
    const uint64_t found =
        static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(token);
    if (found > rank) rank = found;
  });
  __syncthreads();
  rank = reduce_cta(rank, parts.of[0], [](uint64_t a, uint64_t b) { return max(a, b); });
  return ~static_cast<uint32_t>(rank);
}
