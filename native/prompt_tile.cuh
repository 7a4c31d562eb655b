// Tiles of queries, the work of prompt attention.
#pragma once

// Consecutive queries of a request, for all KV heads, and a range of KV blocks. PromptWork in
// dakrun/kernels/attention/prompt.py makes them, and draft_tokens.cu those of rows with drafts.
struct PromptTile {
  int row, queries;         // of q: the first query, and the number of queries
  int position;             // of the first query
  int length;               // positions that are stored; memory past them may be NaN
  int slot;                 // whose block table it is
  int first_block, blocks;  // up to the block of the last query
  int split, splits;        // the range, and the number of ranges
  int partial;              // row of the partial results of split 0; `queries * group` rows each
  int arrivals;             // the first of the counters of its KV heads and parts
  int unused;
};
