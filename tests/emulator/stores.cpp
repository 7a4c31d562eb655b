// The emulator's own memory, and the functions that g++ lets kernels call before each store.
#include <sys/mman.h>

#include <bit>
#include <cstdlib>

#include "machine.cuh"

namespace emulator {

namespace {

constexpr size_t kArena = size_t{1} << 35, kHeader = 64;  // only pages that are touched count
uint8_t* const arena = static_cast<uint8_t*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                                                  0));
size_t taken;
void* freed[64];  // lists of blocks of 2^i bytes

bool is_own(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(arena) < kArena;
}

void stored(const void* to, size_t bytes) {
  if (!in_fiber) return;
  if (!is_own(to)) {
    global_store();
  } else {
    written(*cta, *cta->running, to, bytes);
  }
}

}  // namespace

void* take(size_t bytes) {
  const int size = std::bit_width(bytes + kHeader - 1);
  uint8_t* block = static_cast<uint8_t*>(freed[size]);
  if (block != nullptr) {
    freed[size] = *reinterpret_cast<void**>(block + kHeader);
  } else {
    block = arena + taken;
    taken += size_t{1} << (size < 7 ? 7 : size);
    if (taken > kArena) std::abort();
  }
  *reinterpret_cast<int*>(block) = size;
  return block + kHeader;
}

void give(void* memory) {
  if (memory == nullptr) return;
  if (!is_own(memory)) return std::free(memory);
  uint8_t* const block = static_cast<uint8_t*>(memory) - kHeader;
  void*& list = freed[*reinterpret_cast<int*>(block)];
  *static_cast<void**>(memory) = list;
  list = block;
}

void written(Cta& of, Fiber& thread, const void* to, size_t bytes) {
  const size_t begin = static_cast<const uint8_t*>(to) - of.memory.data();
  if (begin >= of.shared) return;
  const uint16_t self = thread.thread + 1;
  for (uint32_t i = begin / kChunk; i <= (begin + bytes - 1) / kChunk; i++) {
    if (of.writers[i] == self) continue;
    of.writers[i] = self;
    thread.unfenced.push_back(i);
  }
}

void fence() {
  for (const uint32_t i : cta->running->unfenced) {
    if (cta->writers[i] == cta->running->thread + 1) cta->writers[i] = 0;
  }
  cta->running->unfenced.clear();
}

void touch_async(const Cta& of, uint32_t address, size_t bytes) {
  for (uint32_t i = address / kChunk; i <= (address + bytes - 1) / kChunk; i++) {
    if (i < of.writers.size() && of.writers[i]) {
      fail("an asynchronous operation touches shared memory that a thread has written without a "
           "proxy fence");
    }
  }
}

uint64_t global_stores = 0;

void global_store() {
  global_stores++;
  if (!cta->running->waited_for_dependencies) cta->running->stored_early = true;
}

}  // namespace emulator

extern "C" {
void __asan_store1_noabort(void* to) { emulator::stored(to, 1); }
void __asan_store2_noabort(void* to) { emulator::stored(to, 2); }
void __asan_store4_noabort(void* to) { emulator::stored(to, 4); }
void __asan_store8_noabort(void* to) { emulator::stored(to, 8); }
void __asan_store16_noabort(void* to) { emulator::stored(to, 16); }
void __asan_storeN_noabort(void* to, size_t bytes) { emulator::stored(to, bytes); }
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char*) {}
void __asan_after_dynamic_init() {}
}
