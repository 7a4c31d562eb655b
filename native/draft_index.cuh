// What followed the last few tokens in the answers of a run so far: an index of bounded memory.
//
// For each context, the last tokens of a text, the index has the token that followed it last. An
// entry is a word: 28 bits of the step that entered it, 16 of the context's hash, 20 of the token. A
// later entry takes the place of an earlier one, and of several in a step the largest remains, so
// the index does not depend on the order in which rows enter their tokens.
// dakrun/drafts/file_index.py has the same.
#pragma once

#include "ptx.cuh"

constexpr int kContexts = 4, kLongestContext = 8;
constexpr int kTokenBits = 20, kNameBits = 16;
constexpr int kMostSteps = (1 << (64 - kNameBits - kTokenBits)) - 1;

// Tokens of a context, the shortest first.
__device__ __forceinline__ int context_length(int context) {
  return context < kContexts - 1 ? context + 1 : kLongestContext;
}

struct DraftIndex {
  unsigned long long* entries;
  int* steps;  // so far; those of entries count from 1
  int bits;    // the index has 2^bits entries

  // Hash of the last n tokens of a text; `before(i)` is the token i places ahead of the newest one,
  // and is called for i < kLongestContext. Its upper bits are the entry, the lower ones its name.
  template <class Before>
  __device__ static __forceinline__ uint64_t hash(int n, Before before) {
    uint64_t sum = 0;
#pragma unroll
    for (int i = kLongestContext - 1; i >= 0; i--) {
      const uint32_t token = before(i);
      if (i < n) sum = sum * 0x9E3779B97F4A7C15ull + token + 1;
    }
    sum ^= sum >> 29;
    sum *= 0xBF58476D1CE4E5B9ull;
    return sum ^ sum >> 32;
  }

  __device__ static __forceinline__ uint32_t name_of(uint64_t hash) {
    return hash & ((1u << kNameBits) - 1);
  }

  // The token that followed the tokens with this hash; negative if they are not known.
  __device__ __forceinline__ int followed(uint64_t found) const {
    const uint64_t entry = entries[found >> (64 - bits)];
    const uint32_t name = entry >> kTokenBits & ((1u << kNameBits) - 1);
    const bool known = entry != 0 && name == name_of(found);
    return known ? static_cast<int>(entry & ((1u << kTokenBits) - 1)) : -1;
  }

  // Enter, in step `step`, that `token` followed the n tokens up to `newest`.
  __device__ __forceinline__ void enter(const int* newest, int n, int token, int step) const {
    const uint64_t found = hash(n, [&](int i) { return i < n ? newest[-i] : 0; });
    const unsigned long long stamp = min(step, kMostSteps);
    const uint32_t kept = token & ((1u << kTokenBits) - 1);
    atomicMax(entries + (found >> (64 - bits)),
              (stamp << kNameBits | name_of(found)) << kTokenBits | kept);
  }
};
