// PTX instructions that CUDA C++ has no word for, one a function (PTX ISA 8.x, sections 9.7.9
// to 9.7.13). Shared memory is addressed by 32 bits, as the instructions do it: smem_address()
// makes an address, once, as that costs more than the arithmetic on it. Each part has a subject.
#pragma once

#include "ptx_barriers.cuh"
#include "ptx_copies.cuh"
#include "ptx_loads.cuh"
#include "ptx_tensor.cuh"
#include "ptx_words.cuh"
