// PTX instructions without a CUDA C++ equivalent, one per function (PTX ISA 8.x, sections 9.7.9 to
// 9.7.13). Shared memory is addressed by 32-bit addresses, as the instructions expect; compute one
// with smem_address() and do arithmetic on it.
#pragma once

#include "ptx_barriers.cuh"
#include "ptx_copies.cuh"
#include "ptx_loads.cuh"
#include "ptx_tensor.cuh"
#include "ptx_words.cuh"
