// How far drafts of a slot may go.
#pragma once

// dakrun/kernels/draft_tokens.py has the same.
struct SlotDrafts {
  int end;   // positions in the KV cache at the request's end, at most
  int room;  // positions with KV blocks
};
