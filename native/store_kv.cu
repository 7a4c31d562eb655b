// Keys and values of prompts into packed slots (dakrun/kernels/kv_blocks.py), rotated to their
// positions where a model has that, and so the queries and keys in place, for attention.
//
// A thread has a chunk of a head of a token, and the chunk half a head further, its partner in a
// rotation.

#include "element.cuh"
#include "geometry.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS;

// Where a token's keys and values go: `layer_bytes` further in each layer, `head_bytes` in each KV
// head.
struct KVPlace {
  uint8_t* key;  // of the first head, in the first layer
  int64_t layer_bytes, head_bytes;
};

struct StoreKvArgs {
  Element* qkv;             // [n, q_heads + 2 kv_heads, head_dim]
  const int* positions;     // [n]
  const float2* rotations;  // [positions, head_dim / 2]: cosine and sine; or null
  const KVPlace* places;    // [n]
  int n, layer;
  int q_heads, kv_heads, head_dim;
  int swizzle;  // chunk c of position p changes places with chunk c ^ (p % 8 * swizzle / 8)
};

extern "C" __global__ void __launch_bounds__(kThreads)
    store_kv(const __grid_constant__ StoreKvArgs args) {
  ptx::launch_dependents();
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  ptx::wait_for_dependencies();
  const int pairs = args.head_dim / 16;  // of chunks, in a head
  const int skipped = args.rotations ? 0 : args.q_heads;
  const int heads = args.q_heads + 2 * args.kv_heads - skipped;
  const int pair = number % pairs, head = number / pairs % heads + skipped;
  const int64_t token = number / pairs / heads;
  if (token >= args.n) return;
  const int position = args.positions[token];
  const int64_t row = token * (args.q_heads + 2 * args.kv_heads) + head;
  auto* const from = reinterpret_cast<Chunk*>(args.qkv + row * args.head_dim) + pair;
  Chunk first = from[0], second = from[pairs];
  const bool value = head >= args.q_heads + args.kv_heads;
  if (args.rotations && !value) {
    const float2* const turns =
        args.rotations + static_cast<int64_t>(position) * (args.head_dim / 2) + 8 * pair;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float a = to_float(first.of[i]), b = to_float(second.of[i]);
      convert(first.of[i], a * turns[i].x - b * turns[i].y);
      convert(second.of[i], b * turns[i].x + a * turns[i].y);
    }
    from[0] = first, from[pairs] = second;
  }
  if (head < args.q_heads) return;
  const KVPlace place = args.places[token];
  const int kv_head = head - args.q_heads - (value ? args.kv_heads : 0);
  auto* const to = reinterpret_cast<Chunk*>(
      place.key + args.layer * place.layer_bytes + kv_head * place.head_bytes +
      (value ? static_cast<int64_t>(kKvBlock) * args.head_dim * 2 : 0));
  const int turned = position % 8 * args.swizzle / 8;
  to[pair ^ turned] = first;
  to[pair + pairs ^ turned] = second;
}
