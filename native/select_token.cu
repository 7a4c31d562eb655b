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
//     winning thread: write the row's next token, and that and the log entry of its slot; add 1
//                     to its length. Rows without a request (length < 0) write nothing. If the maximum is
//                     NaN or infinite, the log entry is NO_TOKEN.

#include "geometry.cuh"
#include "sampling.cuh"

constexpr int kThreads = ROW_THREADS;
constexpr int kInFlight = 4;    // loads of a thread in flight together
constexpr int kLogits = CHUNK;  // of a chunk

struct SelectTokenArgs {
  const uint16_t* logits;  // [n, vocabulary], bits of Element
  int* tokens;             // [n]
  int* lengths;            // [n], negative in rows without a request
  const int* slots;        // [n]
  int* log;                // [slots, depth], in host memory
  int* newest;             // [slots], or null: newest tokens
  const Sampling* sampling;  // [slots], or null: temperature 0
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

  __device__ __forceinline__ Row(const SelectTokenArgs& args, int row)
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

// Call use(key, logit, token) for all logits of a thread, chunk by chunk; skip chunks that have no
// key of at least `least`.
template <class Use>
__device__ __forceinline__ void for_each_logit(const Row& row, int least, Use use) {
#pragma unroll 1
  for (int first = threadIdx.x; first < row.chunks; first += kInFlight * kThreads) {
    uint4 chunks[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++)
      chunks[i] = row.load(min(first + i * kThreads, row.chunks - 1));
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const int chunk = first + i * kThreads;
      if (chunk >= row.chunks || largest(chunks[i]) < least) continue;
      const uint32_t pairs[] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int j = 0; j < kLogits; j++) {
        const int token = chunk * kLogits - row.before + j;
        const uint32_t bits = pairs[j / 2] >> 16 * (j % 2) & 0xffff;
        const float2 logit = unpacked(bits);
        if (token >= 0 && token < row.size) use(in_order(bits), logit.x, token);
      }
    }
  }
}

// The token of a row whose largest logit is `best`, drawn for the next position. All threads of the
// CTA take part, and get it.
__device__ __forceinline__ int sample(const Row& row, int best, const Sampling& sampling,
                                      int position, SearchParts& parts) {
  const float scale = 1.0f / fmaxf(sampling.temperature, 1e-30f);
  const uint32_t magnitude = abs(best);
  const float largest_logit = unpacked(best < 0 ? magnitude | 0x8000 : magnitude).x;
  int least = -kInfinity;  // of the kept keys
  if (sampling.top_k > 0 && sampling.top_k < row.size) {
    least = find_threshold(least, best + 1, sampling.top_k, parts,
                           [&](int first, int step, int high, uint64_t (&sums)[kProbes]) {
                             for_each_logit(row, first, [&](int key, float, int) {
#pragma unroll
                               for (int i = 0; i < kProbes; i++)
                                 sums[i] += key >= first + i * step && key < high;
                             });
                           });
  }
  if (sampling.top_p < 1.0f) {
    const float log2_scale = 1.4426950408889634f * scale;  // times log2(e)
    const auto add = [&](int first, int step, int high, uint64_t (&sums)[kProbes]) {
      for_each_logit(row, first, [&](int key, float logit, int) {
        if (key < first || key >= high) return;
        const uint32_t amount = mass((logit - largest_logit) * log2_scale);
#pragma unroll
        for (int i = 0; i < kProbes; i++)
          if (key >= first + i * step) sums[i] += amount;
      });
    };
    uint64_t total[kProbes] = {};
    add(least, 0, best + 1, total);
    __syncthreads();  // `parts` of a search before have been read
    const auto plus = [](uint64_t a, uint64_t b) { return a + b; };
    const double sum = reduce_cta(total[0], parts.of[0], plus);
    // Rounded up: a sum is at least the target if it is at least the next integer.
    least = find_threshold(least, best + 1, static_cast<uint64_t>(ceil(sampling.top_p * sum)), parts, add);
  }
  const uint64_t state = noise_state(sampling.seed, position);
  uint64_t rank = 0;  // of the thread's token: larger score first, then smaller token
  for_each_logit(row, least, [&](int key, float logit, int token) {
    if (key < least) return;
    const float score = (logit - largest_logit) * scale + gumbel(state, token);
    const uint32_t bits = reinterpret_cast<const uint32_t&>(score);
    const uint32_t ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
    const uint64_t found =
        static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(token);
    if (found > rank) rank = found;
  });
  __syncthreads();
  rank = reduce_cta(rank, parts.of[0], [](uint64_t a, uint64_t b) { return max(a, b); });
  return ~static_cast<uint32_t>(rank);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    select_token(const __grid_constant__ SelectTokenArgs args) {
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
  if (length < 0) return;
  const int maximum = static_cast<int>(best >> 32) + kBelowAll;
  const bool finite = abs(maximum) < kInfinity;
  int token;
  if (args.sampling != nullptr && finite && args.sampling[slot].temperature > 0.0f) {
    __shared__ SearchParts search;
    token = sample(row, maximum, args.sampling[slot], length + 1, search);
    if (threadIdx.x > 0) return;
  } else {
    if (found.rank() != best) return;
    token = row.nearest(found.chunk * kLogits - row.before + first_of(found.logits, found.value));
  }
  args.tokens[number] = token;
  if (args.newest != nullptr) args.newest[slot] = token;
  // The next step gets a token of the vocabulary all the same, as it may have been launched already.
  args.log[static_cast<int64_t>(slot) * args.depth + length % args.depth] =
      finite ? token : NO_TOKEN;
  args.lengths[number] = length + 1;
}
