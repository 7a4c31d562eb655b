// How far a slot's request may go on, and with how many drafts.
#pragma once

// What a slot may draft. dakrun/kernels/draft_tokens.py has the same.
struct SlotDrafts {
  int end;   // positions in the KV cache at the request's end, at most
  int room;  // positions with KV blocks
  int most;  // drafted tokens
  int unused;
};
