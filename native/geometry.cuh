// Sizes that several kernels share. dakrun/geometry.py has the values and says what each is; every
// compilation gets them as macros. Sizes of one kernel family are named beside that kernel.
#pragma once

constexpr int kMaxTiers = MAX_TIERS;
constexpr int kRowsPerBlock = ROWS_PER_BLOCK;
constexpr int kChunk = CHUNK;                   // 16-bit elements of 16 bytes
constexpr int kAtomChunks = ATOM_COLS / CHUNK;  // of a row of an atom
constexpr int kAtomBytes = ATOM_BYTES;
constexpr int kKvBlock = KV_BLOCK;  // positions
