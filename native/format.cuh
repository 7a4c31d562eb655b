// The weight format of a kernel's packed matrices: 16-bit elements in atoms, or with -DCODE units of
// elements of fewer bits (dakrun/formats/device_layout.py has their order and what codes mean).
#pragma once

#include "geometry.cuh"

#ifndef CODE
#define CODE 0
#define GROUP 128
#define SCALE_BYTES 0
#define ZEROS 0
#endif

enum Code : int { kSixteenBits = 0, kInt4 = 1, kInt8 = 2, kE2m1 = 3, kE4m3 = 4 };

constexpr bool kHasUnits = CODE != kSixteenBits;
constexpr int kUnitAtoms = kHasUnits ? UNIT_ATOMS : 1;
constexpr int kUnitCols = UNIT_ATOMS * ATOM_COLS;
constexpr int kCodeBits = CODE == kSixteenBits ? 16 : CODE == kInt4 || CODE == kE2m1 ? 4 : 8;
constexpr int kUnitGroups = kUnitCols / GROUP;  // of columns that share a scale
constexpr int kRowGroups = kRowsPerBlock * kUnitGroups;

// A unit: the elements of its atoms, scales [8 rows][groups], zeros likewise, factors [8 rows].
constexpr int kCodesBytes = kRowsPerBlock * ATOM_COLS * kCodeBits / 8;  // of an atom
constexpr int kScalesAt = kUnitAtoms * kCodesBytes;
constexpr int kZerosAt = kScalesAt + kRowGroups * SCALE_BYTES;
constexpr int kFactorsAt = kZerosAt + (ZEROS ? kRowGroups * 2 : 0);
constexpr int kUnitBytes = kFactorsAt + (SCALE_BYTES == 1 ? kRowsPerBlock * 4 : 0);
constexpr int kWAtomBytes = kUnitBytes / kUnitAtoms;  // bytes of a row block's 64 columns
