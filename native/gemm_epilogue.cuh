// How SplitK_GEMM's sums come together and become outputs: bias, activation, residual.
#pragma once

#include "splitk_gemm.cuh"

// Two neighbouring elements, at once where their address allows it, or else each by itself, the
// second one where it exists.
__device__ __forceinline__ Pair load_pair(const Element* from, bool both, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pair*>(from);
  Pair pair = {from[0], from[0]};
  if (both) pair.second = from[1];
  return pair;
}

// What the epilogue adds to two neighbouring outputs, of rows `m` and m + 1 of W, m being even, and
// row `n` of X.
struct Addends {
  Pair bias, residual;

  __device__ __forceinline__ Addends(const SplitKGemmArgs& args, int m, int n) {
    if (m >= args.m || n >= args.n) return;
    const bool aligned = args.m % 2 == 0, both = m + 1 < args.m;
    if (args.bias) bias = load_pair(args.bias + m, both, aligned);
    if (args.residual) {
      residual = load_pair(args.residual + static_cast<int64_t>(n) * args.m + m, both, aligned);
    }
  }
};

// Stores the two outputs. With kSiluMul even rows of W are gates and the odd ones what they
// multiply: silu(gate) * up.
__device__ __forceinline__ void store(const SplitKGemmArgs& args, int m, int n,
                                      const Addends& addends, float first, float second) {
  if (m >= args.m || n >= args.n) return;
  if (args.bias) first += to_float(addends.bias.first), second += to_float(addends.bias.second);
  if (args.activation == kSiluMul) {
    convert(args.y[static_cast<int64_t>(n) * (args.m / 2) + m / 2],
            __fdividef(first, 1.0f + __expf(-first)) * second);
    return;
  }
  if (args.activation == kRelu) first = fmaxf(first, 0.0f), second = fmaxf(second, 0.0f);
  if (args.residual) {
    first += to_float(addends.residual.first), second += to_float(addends.residual.second);
  }
  Element* const y = args.y + static_cast<int64_t>(n) * args.m + m;
  Pair pair;
  convert(pair.first, first), convert(pair.second, second);
  if (args.m % 2 == 0) {
    *reinterpret_cast<Pair*>(y) = pair;
  } else {
    y[0] = pair.first;
    if (m + 1 < args.m) y[1] = pair.second;
  }
}

// Adds up the sums of the warps that share k, in a fixed order, by way of `scratch`, and stores the
// outputs of a group, from `first_row` of W on. Goes by rounds of some octets of every warp; in
// each all warps write, and then each adds up and stores some tiles.
struct Exchange {
  static constexpr int kPartials = kTeams * kKWarps;
  static constexpr int kRoundOctets = X_TILES == 1 ? 8 : 4 / kOctetWarps;  // of a warp
  static constexpr int kTiles = kOctetWarps * kRoundOctets * X_TILES;
  static_assert(kPartials * kTiles * kTileBytes == 16 * 1024, "heuristics.py: EXCHANGE_BYTES");

  uint8_t* const scratch;  // [kTiles][kPartials][32 lanes]

  __device__ __forceinline__ void finish(const SplitKGemmArgs& args, int first_row, int octets,
                                         const Share& share, const Sums& sums) const {
    const int warp = threadIdx.x / 32, most = (octets + kOctetWarps - 1) / kOctetWarps;
    const int partial = warp / kTeamWarps * kKWarps + share.k;
    const int owner = warp % kTeamWarps / kKWarps;
#pragma unroll
    for (int round = 0; round < kWarpOctets; round += kRoundOctets) {
      if (round > 0 && round >= most) break;
#pragma unroll
      for (int j = 0; j < kRoundOctets; j++) {
#pragma unroll
        for (int i = 0; i < kWarpTiles; i++) {
          const int tile = (owner * kRoundOctets + j) * kWarpTiles + i;
          if (round + j < share.count) at(tile, partial) = sums.tile[round + j][i];
        }
      }
      sum(args, first_row, octets, most, round);
    }
  }

 private:
  __device__ __forceinline__ float2& at(int tile, int partial) const {
    const int number = (tile * kPartials + partial) * 32 + threadIdx.x % 32;
    return reinterpret_cast<float2*>(scratch)[number];
  }

  __device__ __forceinline__ void sum(const SplitKGemmArgs& args, int first_row, int octets,
                                      int most, int round) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool odd = g % 2;
    ptx::named_barrier_sync(1, kConsumers);
#pragma unroll 1
    for (int tile = warp; tile < kTiles; tile += kConsumerWarps) {
      const int owner = tile / (kRoundOctets * kWarpTiles);
      const int j = round + tile / kWarpTiles % kRoundOctets;
      const int octet = owner % kOctetWarps * most + j;
      if (j >= most || octet >= octets) continue;
      // Neighbouring rows make pairs: even lanes store those of row 2t of X, odd ones of 2t + 1.
      const int row = first_row + kOctetRows * octet + g - odd;
      const int column = (owner / kOctetWarps * kWarpTiles + tile % kWarpTiles) * 8 + 2 * t + odd;
      const Addends addends(args, row, column);
      float2 total = at(tile, 0);
#pragma unroll
      for (int partial = 1; partial < kPartials; partial++) {
        const float2 more = at(tile, partial);
        total.x += more.x, total.y += more.y;
      }
      const float other = __shfl_xor_sync(0xffffffff, odd ? total.x : total.y, 4);
      store(args, row, column, addends, odd ? other : total.x, odd ? total.y : other);
    }
    ptx::named_barrier_sync(1, kConsumers);
  }
};
