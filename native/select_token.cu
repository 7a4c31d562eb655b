// The next token of each row: the argmax of its logits, as torch.argmax has it (the first of equal
// maxima; NaN is the largest), or one drawn with the sampling parameters of the row's slot.
//
//   for each row, one CTA:
//     each thread: the first chunk of 8 logits with the largest maximum it has seen
//     reduce over the CTA by (maximum, earliest chunk)
//     if the slot's temperature is not 0:
//       find the threshold of top-k, then that of top-p, by counts and sums over the row
//       each thread: the largest logit / temperature + noise of its kept tokens
//       reduce over the CTA
//     if the slot has a grammar or other options, instead (adjusted_logits.cuh):
//       wait until the host has written the mask for this position
//       compute the logits of tokens with a bias or a penalty; hide forbidden tokens
//       choose as above, among 32-bit logits; count the token
//     winning thread: write the row's next token, and that and the log entry of its slot; add 1
//                     to its length. Rows without a request (length < 0) write nothing. If the
//                     maximum is NaN or infinite, the log entry is NO_TOKEN; if no token is
//                     allowed, NONE_ALLOWED.

#include "adjusted_logits.cuh"

struct SelectTokenArgs {
  const uint16_t* logits;  // [n, vocabulary], bits of Element
  int* tokens;             // [n]
  int* lengths;            // [n], negative in rows without a request
  const int* slots;        // [n]
  int* log;                // [slots, depth], in host memory
  int* newest;             // [slots], or null: newest tokens
  const Sampling* sampling;  // [slots], or null: temperature 0
  int vocabulary, depth;
  int adjusts;  // 0: leave rows with a mask or adjustments to select_in_order
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
    const uint32_t order = ~static_cast<uint32_t>(chunk);
    return static_cast<uint64_t>(value - kBelowAll) << 32 | order;
  }
};

// Not inlined, so that other rows do not pay for its registers.
__device__ __noinline__ int choose_apart(Row row, const Sampling& sampling, int position,
                                         uint32_t* visible, SearchParts& parts) {
  return choose_adjusted(row, sampling, position, visible, parts);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    select_token(const __grid_constant__ SelectTokenArgs args) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t parts[kMaxWarps];
  ptx::launch_dependents();
  const int number = blockIdx.x;
  const Row row(args.logits, number, args.vocabulary);
  ptx::wait_for_dependencies();
  // Loaded early and used last. A row without a request still reads its logits, which costs less
  // than waiting here for its length.
  const int length = args.lengths[number], slot = args.slots[number];
  Found found;
  row.for_each_chunk([&](const uint4& chunk, int i) { found.consider(chunk, i); });
  const auto larger = [](uint64_t a, uint64_t b) { return max(a, b); };
  const uint64_t best = reduce_cta(found.rank(), parts, larger);
  if (length < 0) return;
  const int maximum = static_cast<int>(best >> 32) + kBelowAll;
  const bool finite = abs(maximum) < kInfinity;
  int token, logged;
  const Sampling* const own = args.sampling + slot;
  const bool adjusts =
      args.sampling != nullptr && (own->mask != nullptr || own->adjustments != nullptr);
  if (adjusts && !args.adjusts) return;
  if (args.sampling != nullptr && finite && (own->temperature > 0.0f || adjusts)) {
    __shared__ SearchParts search;
    if (adjusts) {
      logged = choose_apart(row, *own, length + 1, reinterpret_cast<uint32_t*>(smem), search);
    } else {
      logged = sample(ModelLogits{row}, maximum, logit_of(maximum), *own, length + 1, search);
    }
    if (threadIdx.x > 0) return;
    token = max(logged, 0);
  } else {
    if (found.rank() != best) return;
    token = row.nearest(row.first_token(found.chunk) + first_of(found.logits, found.value));
    logged = finite ? token : NO_TOKEN;
  }
  args.tokens[number] = token;
  if (args.newest != nullptr) args.newest[slot] = token;
  // The next step gets a token of the vocabulary all the same: it may have been launched already.
  args.log[static_cast<int64_t>(slot) * args.depth + length % args.depth] = logged;
  args.lengths[number] = length + 1;
}
