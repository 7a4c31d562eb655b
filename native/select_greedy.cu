// Greedy sampling: the argmax of each row of logits, as torch.argmax has it (the first of equal
// maxima; NaN is the largest).
//
//   for each row, one CTA:
//     each thread: the first chunk of 8 logits with the largest maximum it has seen
//     reduce over the CTA by (maximum, earliest chunk)
//     winning thread: find the logit in its chunk; write the row's next token and the log entry of
//                     its slot; add 1 to its length. Rows without a request (length < 0) write
//                     nothing. If the maximum is NaN or infinite, the log entry is NO_TOKEN.

#include "cta_reduce.cuh"
#include "element.cuh"
#include "geometry.cuh"

constexpr int kThreads = ROW_THREADS;
constexpr int kInFlight = 4;    // loads of a thread in flight together
constexpr int kLogits = CHUNK;  // of a chunk

struct SelectGreedyArgs {
  const uint16_t* logits;  // [n, vocabulary], bits of Element
  int* tokens;             // [n]
  int* lengths;            // [n], negative in rows without a request
  const int* slots;        // [n]
  int* log;                // [slots, depth], in host memory
  int vocabulary, depth;
};

// Integer that orders like the 16-bit float in the low bits of `logit`. Both zeros map to 0. NaN is
// the largest, since max_nan() returns it without a sign.
__device__ __forceinline__ int in_order(uint32_t logit) {
  const int magnitude = logit & 0x7fff;
  return logit & 0x8000 ? -magnitude : magnitude;
}
constexpr int kBelowAll = -0x8000;
constexpr int kInfinity = BFLOAT16 ? 0x7f80 : 0x7c00;  // the ordered integer; NaN is larger

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

  __device__ __forceinline__ Row(const SelectGreedyArgs& args, int row)
      : logits(args.logits + static_cast<int64_t>(row) * args.vocabulary),
        before(reinterpret_cast<uint64_t>(logits) / sizeof(uint16_t) % kLogits),
        size(args.vocabulary),
        chunks((before + size + kLogits - 1) / kLogits) {}

  __device__ __forceinline__ uint4 load(int chunk) const {
    const int first = chunk * kLogits - before;
    if (first >= 0 && first + kLogits <= size) {
      return *reinterpret_cast<const uint4*>(logits + first);
    }
    return {pair(first), pair(first + 2), pair(first + 4), pair(first + 6)};
  }
  // `place` clamped to the row.
  __device__ __forceinline__ int nearest(int place) const { return min(max(place, 0), size - 1); }

 private:
  __device__ __forceinline__ uint32_t pair(int first) const {
    return logits[nearest(first)] | static_cast<uint32_t>(logits[nearest(first + 1)]) << 16;
  }
};

// Largest logit that a thread has seen, and its chunk.
struct Found {
  int value = kBelowAll;
  int chunk = 0;
  uint4 logits;

  // Chunks are given in ascending order.
  __device__ __forceinline__ void consider(const uint4& next, int number) {
    const int maximum = largest(next);
    if (maximum > value) value = maximum, chunk = number, logits = next;
  }
  // Key to maximize: larger value first, then earlier chunk. Lowest for a thread without a chunk.
  __device__ __forceinline__ uint64_t rank() const {
    const uint32_t place = ~static_cast<uint32_t>(chunk);
    return static_cast<uint64_t>(value - kBelowAll) << 32 | place;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    select_greedy(const __grid_constant__ SelectGreedyArgs args) {
  __shared__ uint64_t parts[kMaxWarps];
  ptx::launch_dependents();
  const int number = blockIdx.x;
  const Row row(args, number);
  ptx::wait_for_dependencies();
  // Loaded early and used last. A row without a request still reads its logits, which costs less
  // than waiting here for its length.
  const int length = args.lengths[number], slot = args.slots[number];
  Found found;
#pragma unroll 1
  for (int first = threadIdx.x; first < row.chunks; first += kInFlight * kThreads) {
    uint4 chunks[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++)  // clamped, not skipped, so that all loads are in flight
      chunks[i] = row.load(min(first + i * kThreads, row.chunks - 1));
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const int chunk = first + i * kThreads;
      if (chunk < row.chunks) found.consider(chunks[i], chunk);
    }
  }
  const auto larger = [](uint64_t a, uint64_t b) { return max(a, b); };
  const uint64_t best = reduce_cta(found.rank(), parts, larger);
  if (length < 0 || found.rank() != best) return;
  const int place = found.chunk * kLogits - row.before + first_of(found.logits, found.value);
  const int token = row.nearest(place);
  args.tokens[number] = token;
  // The next step gets a token of the vocabulary all the same, as it may have been launched already.
  const bool finite = abs(found.value) < kInfinity;
  args.log[static_cast<int64_t>(slot) * args.depth + length % args.depth] =
      finite ? token : NO_TOKEN;
  args.lengths[number] = length + 1;
}
