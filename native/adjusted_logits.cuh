// The logits of a row as its grammar and its request's options have them: biases, penalties,
// forbidden tokens. dakrun/engine/adjustments.py has the same in torch.
#pragma once

#include "row_logits.cuh"
#include "sampling.cuh"

constexpr int kPollNs = 500;  // between looks at a counter in host memory
constexpr int kInPrompt = 1 << 30;

// Options of a slot's request, and the tokens with logits of their own; arrays follow the struct.
// dakrun/kernels/adjustments.py makes it.
struct Adjustments {
  int first_end;      // first position at which `ends` are allowed
  int end_count;      // tokens that end a completion
  int word_count;     // bad words
  int word_tokens;    // all of their tokens
  int recent_size;    // newest tokens that are kept: as many as the longest bad word has, less 1
  int bias_count;     // tokens with a bias, the first of `tokens`
  int capacity;       // of `tokens`
  int entries;        // in use: distinct tokens
  int counts_tokens;  // 1 if there are penalties
  float repetition, frequency, presence;

  __device__ __forceinline__ int* ends() { return reinterpret_cast<int*>(this + 1); }
  __device__ __forceinline__ int* word_ends() { return ends() + end_count; }  // in words()
  __device__ __forceinline__ int* words() { return word_ends() + word_count; }
  // The token at position p is number p % recent_size.
  __device__ __forceinline__ int* recent() { return words() + word_tokens; }
  __device__ __forceinline__ int* tokens() { return recent() + recent_size; }
  // How often each of tokens() is in the completion, plus kInPrompt if it is in the prompt.
  __device__ __forceinline__ int* counts() { return tokens() + capacity; }
  __device__ __forceinline__ float* biases() {
    return reinterpret_cast<float*>(counts() + capacity);
  }
  // Their logits in this step, or -infinity where forbidden.
  __device__ __forceinline__ float* logits() { return biases() + bias_count; }
};

// Integer that orders like a float; both zeros map to the same.
__device__ __forceinline__ uint32_t in_order(float value) {
  const uint32_t bits = reinterpret_cast<const uint32_t&>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  return 0x80000000 + (bits & 0x80000000 ? 0 - magnitude : magnitude);
}
constexpr uint32_t kMinusInfinity = 0x80000000 - 0x7f800000;
constexpr uint32_t kPlusInfinity = 0x80000000 + 0x7f800000;
// The float of an ordered integer.
__device__ __forceinline__ float value_of(uint32_t ordered) {
  const uint32_t bits =
      ordered < 0x80000000 ? 0x80000000 | (0x80000000 - ordered) : ordered - 0x80000000;
  return reinterpret_cast<const float&>(bits);
}

// The model's logits of tokens whose bits are set in `visible`, and the logits of `own`.
struct AdjustedLogits {
  using Key = uint32_t;
  static constexpr Key kLowest = kMinusInfinity + 1;
  static constexpr Key kModelKeys = BFLOAT16 ? 1 << 16 : 1 << 13;  // divides keys of the model's
  Row row;
  uint32_t* visible;  // [words(row.size)], in shared memory; bits past the row are 0
  Adjustments* own;   // or null

  __device__ __forceinline__ static int words(int size) { return (size + 31) / 32; }

  // Call use(key, logit, token) for all logits of a thread that have a key of at least `least`.
  // Keys from `end` on need not be shown: the end of a search is among the keys of `own` alone.
  template <class Use>
  __device__ __forceinline__ void for_each(Key least, Key end, Use use) const {
    if (least <= (end - 1) / kModelKeys * kModelKeys) {
      row.for_each_chunk([&](const uint4& chunk, int number) {
        const int first = row.first_token(number);
        const uint32_t seen = bits_from(first);
        if (seen == 0 || in_order(logit_of(largest(chunk))) < least) return;
        for_each_of(chunk, first, [&](uint32_t bits, int token) {
          const float logit = unpacked(bits).x;
          const Key key = in_order(logit);
          if (seen >> (token - first) & 1 && key >= least) use(key, logit, token);
        });
      });
    }
    if (own == nullptr) return;
    for (int i = threadIdx.x; i < own->entries; i += kThreads) {
      const float logit = own->logits()[i];
      const Key key = in_order(logit);
      if (key >= least) use(key, logit, own->tokens()[i]);
    }
  }

  // Show the tokens of a mask, or all. The CTA must synchronize before it goes on.
  __device__ __forceinline__ void show(const uint32_t* mask) const {
    for (int i = threadIdx.x; i < words(row.size); i += kThreads) {
      const uint32_t in_row = ~0u >> (32 - min(row.size - 32 * i, 32));
      visible[i] = mask == nullptr ? in_row : mask[i] & in_row;
    }
  }

  // Hide tokens that end a completion too early, and those that would complete a bad word.
  __device__ __forceinline__ void forbid(int position) const {
    if (position < own->first_end) {
      for (int i = threadIdx.x; i < own->end_count; i += kThreads)
        if (own->ends()[i] < row.size) hide(own->ends()[i]);
    }
    for (int i = threadIdx.x; i < own->word_count; i += kThreads) {
      const int* const last = own->words() + own->word_ends()[i] - 1;
      const int before = own->word_ends()[i] - (i > 0 ? own->word_ends()[i - 1] : 0) - 1;
      bool matches = position >= before;
      for (int back = 1; matches && back <= before; back++)
        matches = last[-back] == own->recent()[(position - back) % own->recent_size];
      if (matches) hide(*last);
    }
  }

  // Compute the logits of `own`, and hide the model's. Rounds as torch does: nothing is fused.
  __device__ __forceinline__ void adjust() const {
    for (int i = threadIdx.x; i < own->entries; i += kThreads) {
      const int token = own->tokens()[i], count = own->counts()[i];
      const int times = count & ~kInPrompt;
      float logit = unpacked(row.logits[token]).x;
      if (i < own->bias_count) logit += own->biases()[i];
      if (count != 0) {
        logit = logit > 0.0f ? logit / own->repetition : logit * own->repetition;
        logit = __fsub_rn(logit, __fmul_rn(static_cast<float>(times), own->frequency));
        logit = __fsub_rn(logit, times > 0 ? own->presence : 0.0f);
      }
      own->logits()[i] = hide(token) ? logit : value_of(kMinusInfinity);
    }
  }

  // Record the token of a position. All threads of the CTA take part.
  __device__ __forceinline__ void record(int token, int position,
                                         uint64_t (&parts)[kMaxWarps]) const {
    if (own->counts_tokens) {
      const int entries = own->entries;
      uint64_t found = 0;
      for (int i = threadIdx.x; i < entries; i += kThreads)
        if (own->tokens()[i] == token) own->counts()[i]++, found = 1;
      found = reduce_cta(found, parts, [](uint64_t a, uint64_t b) { return a | b; });
      if (threadIdx.x == 0 && !found && entries < own->capacity) {
        own->tokens()[entries] = token;
        own->counts()[entries] = 1;
        own->entries = entries + 1;
      }
    }
    if (threadIdx.x == 0 && own->recent_size > 0)
      own->recent()[position % own->recent_size] = token;
  }

 private:
  // Hide a token; returns whether it was visible.
  __device__ __forceinline__ bool hide(int token) const {
    const uint32_t bit = 1u << token % 32;
    return atomicAnd(visible + token / 32, ~bit) & bit;
  }
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

// The token for `position` of a row with a mask or adjustments: of its vocabulary, or NO_TOKEN, or
// NONE_ALLOWED. All threads of the CTA take part, and get the token. `visible` is shared memory for
// AdjustedLogits.
__device__ __forceinline__ int choose_adjusted(Row row, const Sampling& sampling, int position,
                                            uint32_t* visible, SearchParts& parts) {
  Adjustments* const own = sampling.adjustments;
  const AdjustedLogits logits{row, visible, own};
  if (sampling.mask != nullptr) wait_for_mask(sampling, position);
  uint64_t rank;  // of the largest logit: larger key first, then smaller token
  for (bool forbids = own != nullptr;; forbids = false) {
    logits.show(sampling.mask);
    __syncthreads();
    if (forbids) {
      logits.forbid(position);
      __syncthreads();
    }
    if (own != nullptr) {
      logits.adjust();
      __syncthreads();
    }
    rank = 0;
    logits.for_each(AdjustedLogits::kLowest, kPlusInfinity, [&](uint32_t key, float, int token) {
      rank = max(rank, static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(token));
    });
    rank = reduce_cta(rank, parts.of[0], [](uint64_t a, uint64_t b) { return max(a, b); });
    // A grammar beats what is forbidden.
    if (rank != 0 || !forbids || sampling.mask == nullptr) break;
  }
  if (rank == 0) return NONE_ALLOWED;
  const uint32_t best = rank >> 32;
  if (best == kPlusInfinity) return NO_TOKEN;
  int token = ~static_cast<uint32_t>(rank);
  if (sampling.temperature > 0.0f) {
    __syncthreads();  // `parts` has been read
    token = sample(logits, best, value_of(best), sampling, position, parts);
  }
  if (own != nullptr) logits.record(token, position, parts.of[1]);
  return token;
}
