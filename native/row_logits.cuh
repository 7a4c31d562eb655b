// A row of logits, read in chunks of 16 bytes by all threads of a CTA.
#pragma once

#include "element.cuh"
#include "geometry.cuh"

constexpr int kThreads = ROW_THREADS;
constexpr int kInFlight = 4;    // loads of a thread in flight together
constexpr int kLogits = CHUNK;  // of a chunk

// Integer that orders like the 16-bit float in the low bits of `logit`. Both zeros map to 0. NaN is
// the largest, since max_nan() returns it without a sign.
__device__ __forceinline__ int in_order(uint32_t logit) {
  const int magnitude = logit & 0x7fff;
  return logit & 0x8000 ? -magnitude : magnitude;
}
constexpr int kBelowAll = -0x8000;
constexpr int kInfinity = BFLOAT16 ? 0x7f80 : 0x7c00;  // the ordered integer; NaN is larger

// The logit of an ordered integer.
__device__ __forceinline__ float logit_of(int ordered) {
  const uint32_t magnitude = abs(ordered);
  return unpacked(ordered < 0 ? magnitude | 0x8000 : magnitude).x;
}

// Largest logit of a chunk, as an ordered integer.
__device__ __forceinline__ int largest(const uint4& chunk) {
  const uint32_t two = ptx::max_nan(ptx::max_nan(chunk.x, chunk.y, Element()),
                                    ptx::max_nan(chunk.z, chunk.w, Element()), Element());
  return in_order(ptx::max_nan(two, two >> 16, Element()));
}

// Index of the first logit of a chunk that equals `value`.
__device__ __forceinline__ int first_of(const uint4& chunk, int value) {
  const uint32_t pairs[] = {chunk.x, chunk.y, chunk.z, chunk.w};
  int first = 0;
#pragma unroll
  for (int i = kLogits; i-- > 0;) {
    const uint32_t pair = ptx::max_nan(pairs[i / 2], pairs[i / 2], Element());
    if (in_order(pair >> 16 * (i % 2)) == value) first = i;
  }
  return first;
}

// A row as chunks aligned to 16 bytes. The first and last chunk may reach past the row; there they
// repeat its first or last logit.
struct Row {
  const uint16_t* logits;
  int before;  // elements of the first chunk that precede the row
  int size, chunks;

  __device__ __forceinline__ Row(const uint16_t* first_row, int number, int vocabulary)
      : logits(first_row + static_cast<int64_t>(number) * vocabulary),
        before(reinterpret_cast<uint64_t>(logits) / sizeof(uint16_t) % kLogits),
        size(vocabulary),
        chunks((before + size + kLogits - 1) / kLogits) {}

  __device__ __forceinline__ uint4 load(int chunk) const {
    const int first = first_token(chunk);
    if (first >= 0 && first + kLogits <= size) {
      return *reinterpret_cast<const uint4*>(logits + first);
    }
    return {pair(first), pair(first + 2), pair(first + 4), pair(first + 6)};
  }
  // Token of a chunk's first logit, negative where the chunk begins before the row.
  __device__ __forceinline__ int first_token(int chunk) const { return chunk * kLogits - before; }
  // `index` clamped to the row.
  __device__ __forceinline__ int nearest(int index) const { return min(max(index, 0), size - 1); }

  // Call use(logits, number) for all chunks of a thread, in ascending order.
  template <class Use>
  __device__ __forceinline__ void for_each_chunk(Use use) const {
#pragma unroll 1
    for (int first = threadIdx.x; first < chunks; first += kInFlight * kThreads) {
      uint4 loaded[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; i++)  // clamped, not skipped, so that all loads are in flight
        loaded[i] = load(min(first + i * kThreads, chunks - 1));
#pragma unroll
      for (int i = 0; i < kInFlight; i++) {
        const int chunk = first + i * kThreads;
        if (chunk < chunks) use(loaded[i], chunk);
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t pair(int first) const {
    return logits[nearest(first)] | static_cast<uint32_t>(logits[nearest(first + 1)]) << 16;
  }
};

// Call use(bits, token) for all logits of a chunk.
template <class Use>
__device__ __forceinline__ void for_each_of(const uint4& chunk, int first_token, Use use) {
  const uint32_t pairs[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int j = 0; j < kLogits; j++)
    use(pairs[j / 2] >> 16 * (j % 2) & 0xffff, first_token + j);
}

// The logits as the model has them.
struct ModelLogits {
  using Key = int;
  static constexpr Key kLowest = -kInfinity;
  Row row;

  // Call use(key, logit, token) for all logits of a thread, chunk by chunk; skip chunks that have
  // no key of at least `least`. Keys from the second argument on need not be shown.
  template <class Use>
  __device__ __forceinline__ void for_each(Key least, Key, Use use) const {
    row.for_each_chunk([&](const uint4& chunk, int number) {
      if (largest(chunk) < least) return;
      for_each_of(chunk, row.first_token(number), [&](uint32_t bits, int token) {
        if (token >= 0 && token < row.size) use(in_order(bits), unpacked(bits).x, token);
      });
    });
  }
};
