// Which of a step's tokens count: the token after each row's newest one, and those after its drafts
// as long as each draft is the token that was chosen before it.
//
//   for each row with a request, one warp:
//     count the chosen tokens up to the first that its draft did not foresee
//     append them to the slot's text; the last is the slot's newest token
//     enter them in the index of all answers
//     write how many they are to the slot's log, where the host reads it after the step
//     let the row go on behind them, or be idle where the request is at its end
//
// dakrun/engine/acceptance.py has the same in torch.

#include "draft_index.cuh"
#include "slot_drafts.cuh"

constexpr int kThreads = ELEMENTWISE_THREADS, kRows = kThreads / 32;

struct AcceptDraftsArgs {
  const int* chosen;     // [rows][width]
  const int* tokens;     // [rows][width]: the newest token, and drafts; unused if width is 1
  const int* positions;  // [rows][width]: of the chosen tokens; 0 or less where there is none
  const int* matches;    // [rows]: lengths of the matches of drafts; or null
  const int* slots;      // [rows]
  const SlotDrafts* limits;  // [slots]
  int* row_tokens;       // [rows]: newest tokens
  int* lengths;          // [rows]: cached positions, negative in rows without a request
  int* text;             // [slots][text_size]
  int* newest;           // [slots]
  int* cached;           // [slots]: cached positions
  int* log;              // [slots][depth], in host memory: entry start % depth of a step
  DraftIndex index;
  int rows, width, text_size, depth;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    accept_drafts(const __grid_constant__ AcceptDraftsArgs args) {
  ptx::launch_dependents();
  const int row = blockIdx.x * kRows + threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::wait_for_dependencies();
  if (row >= args.rows) return;
  const int first = row * args.width, begin = args.positions[first];
  if (begin <= 0) {
    if (lane == 0) args.lengths[row] = -1;
    return;
  }
  const int slot = args.slots[row];
  int drafted = 0;
  while (drafted + 1 < args.width && args.positions[first + drafted + 1] > 0) drafted++;
  int accepted = 0;
  while (accepted < drafted && args.tokens[first + accepted + 1] == args.chosen[first + accepted])
    accepted++;
  int* const text = args.text + static_cast<int64_t>(slot) * args.text_size;
  for (int i = lane; i <= accepted; i += 32) text[begin + i] = args.chosen[first + i];
  __syncwarp();
  const int step = *args.index.steps;
  for (int i = lane; i < (accepted + 1) * kContexts; i += 32) {
    const int position = begin + i / kContexts, n = context_length(i % kContexts);
    if (position >= n && text[position] >= 0)
      args.index.enter(text + position - 1, n, text[position], step);
  }
  if (lane > 0) return;
  const int token = args.chosen[first + accepted], length = begin + accepted;
  args.row_tokens[row] = token;
  args.newest[slot] = token;
  args.cached[slot] = length;
  args.lengths[row] = length < args.limits[slot].end ? length : -1;
  const int match = args.matches ? args.matches[row] : 0;
  args.log[static_cast<int64_t>(slot) * args.depth + (begin - 1) % args.depth] =
      accepted + 1 | drafted << 8 | match << 16;
}
