// The options by which the tokens of a slot are chosen.
#pragma once

#include "ptx.cuh"

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
