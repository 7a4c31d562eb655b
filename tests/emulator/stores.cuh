// operator new of a library of the emulator, into whose main source this is included: the linker is
// told not to export it. The emulator's own memory is then in one arena, and a store outside of
// that is to global memory.
#pragma once

#include <new>

#include "machine.cuh"

void* operator new(size_t bytes) { return emulator::take(bytes); }
void* operator new[](size_t bytes) { return emulator::take(bytes); }
void* operator new(size_t bytes, std::align_val_t) { return emulator::take(bytes); }
void* operator new[](size_t bytes, std::align_val_t) { return emulator::take(bytes); }
void operator delete(void* memory) noexcept { emulator::give(memory); }
void operator delete[](void* memory) noexcept { emulator::give(memory); }
void operator delete(void* memory, size_t) noexcept { emulator::give(memory); }
void operator delete[](void* memory, size_t) noexcept { emulator::give(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { emulator::give(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { emulator::give(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { emulator::give(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { emulator::give(memory); }
