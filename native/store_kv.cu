// Stores the keys and values of prompts in KV blocks (dakrun/kernels/attention/kv_blocks.py),
// and applies RoPE to queries and keys.
//
//   for each (token, head, pair of chunks half a head apart, which RoPE rotates together), one
//   thread:
//     wait for predecessor kernels
//     queries and keys, with RoPE: rotate the pair to the token's position, in address
//     keys and values: store the pair in the token's row of its KV block, swizzled

#include "element.cuh"
#include "geometry.cuh"
#include "kv_address.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS;

struct StoreKvArgs {
  Element* qkv;             // [n, q_heads + 2 kv_heads, head_dim]
  const int* positions;     // [n], negative for tokens to skip
  const float2* rotations;  // [positions, head_dim / 2]: cosine and sine; or null
  const KVAddress* kv_addresses;    // [n]
  int n, layer;
  int q_heads, kv_heads, head_dim;
  int swizzle;  // chunk c of position p lies at c ^ (p % 8 * swizzle / 8)
};

extern "C" __global__ void __launch_bounds__(kThreads)
    store_kv(const __grid_constant__ StoreKvArgs args) {
  ptx::launch_dependents();
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  ptx::wait_for_dependencies();
  const int pairs = args.head_dim / 16;  // of chunks in a head
  const int skipped = args.rotations ? 0 : args.q_heads;
  const int heads = args.q_heads + 2 * args.kv_heads - skipped;
  const int pair = number % pairs, head = number / pairs % heads + skipped;
  const int64_t token = number / pairs / heads;
  if (token >= args.n) return;
  const int position = args.positions[token];
  if (position < 0) return;
  const int64_t row = token * (args.q_heads + 2 * args.kv_heads) + head;
  auto* const from = reinterpret_cast<Chunk*>(args.qkv + row * args.head_dim) + pair;
  Chunk first = from[0], second = from[pairs];
  const bool value = head >= args.q_heads + args.kv_heads;
  if (args.rotations && !value) {
    const float2* const rotation =
        args.rotations + static_cast<int64_t>(position) * (args.head_dim / 2) + 8 * pair;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float a = to_float(first.of[i]), b = to_float(second.of[i]);
      convert(first.of[i], a * rotation[i].x - b * rotation[i].y);
      convert(second.of[i], b * rotation[i].x + a * rotation[i].y);
    }
    from[0] = first, from[pairs] = second;
  }
  if (head < args.q_heads) return;
  const KVAddress address = args.kv_addresses[token];
  const int kv_head = head - args.q_heads - (value ? args.kv_heads : 0);
  auto* const to = reinterpret_cast<Chunk*>(
      address.key + args.layer * address.layer_bytes + kv_head * address.head_bytes +
      (value ? static_cast<int64_t>(kKvBlock) * args.head_dim * 2 : 0));
  const int mask = position % 8 * args.swizzle / 8;
  to[pair ^ mask] = first;
  to[pair + pairs ^ mask] = second;
}
