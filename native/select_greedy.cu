// Greedy sampling: of each row of logits the first of the largest, as torch.argmax has it, and what
// follows from it: the row's next token, an entry in its slot's log, a longer sequence.
//
// A CTA reads a row in chunks of 8 logits. A thread keeps the first chunk with the largest it has
// seen; which of its logits that is, is found once, by the thread that has the row's.

#include "cta_reduce.cuh"
#include "element.cuh"

constexpr int kThreads = ROW_THREADS;
constexpr int kInFlight = 4;  // loads of a thread that are under way together
constexpr int kLogits = 8;    // of a chunk

struct SelectGreedyArgs {
  const uint16_t* logits;  // [n, vocabulary], bits of Element
  int* tokens;             // [n]
  int* lengths;            // [n], negative in rows without a request
  const int* slots;        // [n]
  int* log;                // [slots, depth], in host memory
  int vocabulary, depth;
};

// A number in the order of a logit, which lies in the low bits. Floats are sign and magnitude, both
// zeros are alike; NaN is the largest, since max_nan() gives it without a sign.
__device__ __forceinline__ int in_order(uint32_t logit) {
  const int magnitude = logit & 0x7fff;
  return logit & 0x8000 ? -magnitude : magnitude;
}
constexpr int kLeast = -0x8000;  // below all of them

__device__ __forceinline__ int largest(const uint4& chunk) {
  const uint32_t two = ptx::max_nan(ptx::max_nan(chunk.x, chunk.y, Element()),
                                    ptx::max_nan(chunk.z, chunk.w, Element()), Element());
  return in_order(ptx::max_nan(two, two >> 16, Element()));
}

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

// A row as chunks at multiples of 16 bytes, the first and the last of which it may fill in part:
// its outermost logits then fill the rest.
struct Row {
  const uint16_t* logits;
  int before;  // places of the first chunk that are not the row's
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
  __device__ __forceinline__ int nearest(int place) const { return min(max(place, 0), size - 1); }

 private:
  __device__ __forceinline__ uint32_t pair(int first) const {
    return logits[nearest(first)] | static_cast<uint32_t>(logits[nearest(first + 1)]) << 16;
  }
};

struct Found {
  int value = kLeast;
  int chunk = 0;
  uint4 logits;

  // Chunks come in order.
  __device__ __forceinline__ void consider(const uint4& next, int number) {
    const int most = largest(next);
    if (most > value) value = most, chunk = number, logits = next;
  }
  // The larger, the better: by the value, then by the place. A thread with no chunk is below all.
  __device__ __forceinline__ uint64_t rank() const {
    const uint32_t place = ~static_cast<uint32_t>(chunk);
    return static_cast<uint64_t>(value - kLeast) << 32 | place;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    select_greedy(const __grid_constant__ SelectGreedyArgs args) {
  __shared__ uint64_t parts[kMaxWarps];
  ptx::launch_dependents();
  const int number = blockIdx.x;
  const Row row(args, number);
  ptx::wait_for_dependencies();
  // For the end, as waiting for them there or here would cost more than an idle row's logits.
  const int length = args.lengths[number], slot = args.slots[number];
  Found found;
#pragma unroll 1
  for (int first = threadIdx.x; first < row.chunks; first += kInFlight * kThreads) {
    uint4 chunks[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++)  // behind the last the last one, so that all are under way
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
  args.log[static_cast<int64_t>(slot) * args.depth + length % args.depth] = token;
  args.lengths[number] = length + 1;
}
