// RMSNorm of each query and key head (as in Qwen3), in place, one warp per head.
//
//   wait for predecessor kernels
//   load the head: a lane has 8 elements
//   out = x / sqrt(mean(x^2) + eps), rounded, * weight

#include "common.cuh"
#include "element.cuh"
#include "geometry.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS;

struct NormalizeHeadsArgs {
  Element* qkv;             // [n, q_heads + 2 kv_heads, head_dim]
  const Element* q_weight;  // [head_dim]
  const Element* k_weight;
  int n, q_heads, kv_heads;
  int head_dim;  // a multiple of 8, at most 256
  float eps;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    normalize_heads(const __grid_constant__ NormalizeHeadsArgs args) {
  ptx::launch_dependents();
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, heads = args.q_heads + args.kv_heads;
  const int64_t token = number / heads;
  const int head = number % heads;
  const bool holds = 8 * lane < args.head_dim;
  Chunk weight = {}, x = {};
  if (holds) weight = reinterpret_cast<const Chunk*>(head < args.q_heads ? args.q_weight
                                                                         : args.k_weight)[lane];
  ptx::wait_for_dependencies();
  if (token >= args.n) return;
  const int64_t row = token * (args.q_heads + 2 * args.kv_heads) + head;
  Chunk* const at = reinterpret_cast<Chunk*>(args.qkv + row * args.head_dim) + lane;
  if (holds) x = *at;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++)
    sum += holds ? to_float(x.of[i]) * to_float(x.of[i]) : 0.0f;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  const float scale = rsqrtf(sum / args.head_dim + args.eps);
  if (!holds) return;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    Element rounded;
    convert(rounded, to_float(x.of[i]) * scale);
    convert(x.of[i], to_float(rounded) * to_float(weight.of[i]));
  }
  *at = x;
}
