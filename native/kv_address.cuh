// Where the keys and values of a token are stored.
#pragma once

#include "ptx.cuh"

// Address of a token's row in the cache: `layer_bytes` from layer to layer, `head_bytes` from KV
// head to KV head.
struct KVAddress {
  uint8_t* key;  // of the first KV head in the first layer
  int64_t layer_bytes, head_bytes;
};
