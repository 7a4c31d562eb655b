// The tokens of a step with drafts, of slots with a grammar or other options that change logits:
// masks and counts of tokens depend on the token before, so one token is chosen after the other.
//
//   for each row of such a slot, one CTA:
//     for the newest token and then each draft, up to the first draft that was not chosen:
//       choose the token behind it as select_token does (adjusted_logits.cuh); count this token
//
// Tokens behind a draft that was not chosen are left as they are: accept_drafts ignores them.

#include "adjusted_logits.cuh"

struct SelectInOrderArgs {
  const uint16_t* logits;    // [rows][width][vocabulary], bits of Element
  const int* drafts;         // [rows][width]: the tokens that the logits follow
  int* tokens;               // [rows][width]
  int* lengths;              // [rows][width], negative where there is no token
  const int* slots;          // [rows][width]
  int* log;                  // [slots][depth], in host memory
  const Sampling* sampling;  // [slots]
  int vocabulary, depth, width;
};

// Whether the largest logit of a row is finite. All threads of the CTA take part.
__device__ __forceinline__ bool is_finite(const Row& row, uint64_t (&parts)[kMaxWarps]) {
  int maximum = kBelowAll;
  row.for_each_chunk([&](const uint4& chunk, int) { maximum = max(maximum, largest(chunk)); });
  const uint64_t best = reduce_cta<uint64_t>(maximum - kBelowAll, parts,
                                             [](uint64_t a, uint64_t b) { return max(a, b); });
  return abs(static_cast<int>(best) + kBelowAll) < kInfinity;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    select_in_order(const __grid_constant__ SelectInOrderArgs args) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ SearchParts parts;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int first = blockIdx.x * args.width, slot = args.slots[first];
  const Sampling& own = args.sampling[slot];
  if (own.mask == nullptr && own.adjustments == nullptr) return;
#pragma unroll 1
  for (int i = first; i < first + args.width; i++) {
    const int length = args.lengths[i];
    if (length < 0) return;
    const Row row(args.logits, i, args.vocabulary);
    int logged = NO_TOKEN;
    if (is_finite(row, parts.of[0]))
      logged = choose_adjusted(row, own, length + 1, reinterpret_cast<uint32_t*>(smem), parts);
    const int token = max(logged, 0);
    __syncthreads();  // all have read the length; the slot's counts are written, `parts` read
    if (threadIdx.x == 0) {
      args.tokens[i] = token;
      args.lengths[i] = length + 1;
      // The host writes the next mask when it sees this token; the CTA may wait for that mask.
      ptx::store_release_sys(
          args.log + static_cast<int64_t>(slot) * args.depth + length % args.depth, logged);
    }
    if (logged < 0 || i + 1 == first + args.width || args.drafts[i + 1] != token) return;
  }
}
