// Drafts of the rows of a step: from each row's own text, from the index of all answers, or from
// the host's proposals. Also operands with which the step's other kernels compute several tokens of
// a row: positions, addresses of keys and values, tiles of queries.
//
//   for each row, one CTA:
//     each thread: for some positions, the longest match of the text's end with the text before them
//     reduce over the CTA: the longest match; of equal ones, the last
//     one warp: the tokens that follow by the index, if it knows a longer end of the text than the
//               match, by two tokens at least if that has two or more; a draft follows from the
//               text and the drafts before it. Where neither knows an end of the text, the first
//               draft is a token that is common there
//     drafts = the tokens behind the longest of the matches; as many as the match, the request and
//              its KV blocks allow
//     write the row's `width` tokens: the newest one, its drafts, and idle ones (position -1)
//     write its tiles: one for each of `max_splits` ranges of KV blocks; without work it is empty
//
// dakrun/drafts/suffix.py says which match counts.

#include "common.cuh"
#include "cta_reduce.cuh"
#include "draft_index.cuh"
#include "geometry.cuh"
#include "row_tiles.cuh"
#include "slot_drafts.cuh"

constexpr int kThreads = DRAFT_THREADS;
constexpr int kLongest = LONGEST_MATCH, kMostTokens = DRAFT_MAX_TOKENS;

struct DraftTokensArgs {
  const int* lengths;         // [rows], negative in rows without a request
  const int* slots;           // [rows]
  const int* text;            // [slots][text_size]: tokens by position
  const SlotDrafts* limits;   // [slots]
  const int* by_match;        // [kLongest + 1]: drafted tokens at most, by the match's length
  const int* common;          // the first draft without a match; negative if there is none
  // [slots][proposal_size]: tokens that may follow the newest one at a position, from the host:
  // that position, the length of their match, then the tokens, negative from their end on.
  const int* proposals;
  const uint64_t* tables;     // [slots][table_blocks]: addresses of KV blocks
  int* tokens;                // [rows][width]
  int* positions;             // [rows][width]
  int* token_slots;           // [rows][width]
  int* matches;               // [rows]: the match's length; -1 in rows without a request
  KVAddress* kv_addresses;    // [rows][width]
  PromptTile* tiles;          // [rows][max_splits]
  DraftIndex index;
  int64_t layer_bytes, head_bytes, row_bytes;
  int text_size, table_blocks, proposal_size;
  int width;  // tokens of a row: its newest one, and drafts
  int max_splits, split_blocks;
  int kv_heads, group, parts;
};

// Length of the match of the text's end, [.., newest], with the text before `match_end`.
__device__ __forceinline__ int match_length(const int* text, const int* end, int match_end) {
  const int most = min(match_end, kLongest);
  int length = 0;
  while (length < most && text[match_end - 1 - length] == end[length]) length++;
  return length;
}

// The tokens that a slot's proposal has behind position `start`. Null if the text has got other
// tokens since, or is past the proposal's end.
__device__ __forceinline__ const int* proposed(const int* proposal, int size, const int* text,
                                               int start) {
  const int passed = start - proposal[0];
  if (passed < 0 || passed >= size - 2) return nullptr;
  const int* const tokens = proposal + 2;
  for (int i = 0; i < passed; i++)
    if (text[proposal[0] + 1 + i] != tokens[i]) return nullptr;
  return tokens[passed] >= 0 ? tokens + passed : nullptr;
}

// Drafts by the index, behind the last tokens of a text.
struct Indexed {
  int drafts[kMostTokens];
  int count, match;  // how many they are, and how many last tokens the index knows
};

// Find up to `most` drafts that follow text[start], if the index knows an end of the text that is
// longer than `match`, by two tokens if that has two or more. If the index knows none and `match`
// is 0, they begin with `common`. For one warp.
__device__ __forceinline__ void find_indexed(const DraftIndex& index, const int* text, int start,
                                             int match, int common, int most, Indexed& found) {
  const int lane = threadIdx.x % 32, n = context_length(lane);
  // The first lanes have the last tokens, the newest one last.
  int recent = lane < kLongestContext ? text[max(0, start + 1 - kLongestContext + lane)] : 0;
  int count = 0, length = 0;
  while (count < most) {
    const uint64_t context = DraftIndex::hash(
        n, [&](int i) { return __shfl_sync(0xffffffff, recent, kLongestContext - 1 - i); });
    const bool asks = lane < kContexts && n <= start + 1 + count;
    const int token = asks ? index.followed(context) : -1;
    const int longest = __reduce_max_sync(0xffffffff, token >= 0 ? lane : -1);
    if (longest < 0 && (count > 0 || match > 0 || common < 0)) break;
    if (count == 0 && longest >= 0) {
      length = context_length(longest);
      if (length <= match + (match > 1)) break;
    }
    const int next = longest < 0 ? common : __shfl_sync(0xffffffff, token, longest);
    if (lane == 0) found.drafts[count] = next;
    const int later = __shfl_sync(0xffffffff, recent, lane + 1);
    recent = lane == kLongestContext - 1 ? next : later;
    count++;
  }
  if (lane == 0) found.count = count, found.match = length;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    draft_tokens(const __grid_constant__ DraftTokensArgs args) {
  __shared__ uint64_t parts[kMaxWarps];
  __shared__ int end[kLongest];  // the newest token first
  __shared__ Indexed of_index;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int row = blockIdx.x, slot = args.slots[row], start = args.lengths[row];
  const SlotDrafts limits = args.limits[slot];
  const bool idle = start < 0 || start >= limits.end;
  const int* const text = args.text + static_cast<int64_t>(slot) * args.text_size;
  if (!idle && threadIdx.x < kLongest)
    end[threadIdx.x] = text[max(0, start - static_cast<int>(threadIdx.x))];
  __syncthreads();
  uint64_t best = 0;
  if (!idle) {
#pragma unroll 1
    for (int match_end = 1 + threadIdx.x; match_end <= start; match_end += kThreads) {
      const uint64_t length = match_length(text, end, match_end);
      if (length > 0) best = max(best, length << 32 | match_end);
    }
  }
  best = reduce_cta(best, parts, [](uint64_t a, uint64_t b) { return max(a, b); });
  int match = static_cast<int>(best >> 32);
  const int match_end = static_cast<int>(best);
  const int* const proposal = args.proposals + static_cast<int64_t>(slot) * args.proposal_size;
  const int* others = nullptr;  // drafts that are not from the row's own text
  int drafts = 0, known = match > 0 ? args.width - 1 : 0;
  if (threadIdx.x < 32 && !idle && match < kLongestContext)
    find_indexed(args.index, text, start, match, *args.common, args.width - 1, of_index);
  __syncthreads();
  if (!idle && match < kLongestContext && of_index.count > 0) {
    others = of_index.drafts;
    known = of_index.count, match = of_index.match;
  }
  if (!idle && proposal[1] > match) {
    others = proposed(proposal, args.proposal_size, text, start);
    if (others != nullptr) {
      const int left = static_cast<int>(proposal + args.proposal_size - others);
      match = proposal[1], known = 0;
      while (known < min(args.width - 1, left) && others[known] >= 0) known++;
    }
  }
  if (!idle) {
    const int left = min(limits.room, limits.end) - 1 - start;
    drafts = max(0, min(min(args.by_match[match], known), left));
  }
  for (int i = threadIdx.x; i < args.width; i += kThreads) {
    const int number = row * args.width + i, position = start + i;
    const bool used = !idle && i <= drafts;
    int token = 0;
    if (used && i == 0) {
      token = text[start];
    } else if (used) {
      token = others ? others[i - 1] : text[match_end + (i - 1) % (start + 1 - match_end)];
    }
    args.tokens[number] = token;
    args.positions[number] = used ? position : -1;
    args.token_slots[number] = slot;
    args.kv_addresses[number] = used ? kv_address_of(args, slot, position) : KVAddress{};
  }
  for (int split = threadIdx.x; split < args.max_splits; split += kThreads)
    write_tile(args, row, split, slot, start, idle ? 0 : 1 + drafts);
  if (row == 0 && threadIdx.x == 0) *args.index.steps += 1;
  if (threadIdx.x == 0) args.matches[row] = idle ? -1 : match;
}
