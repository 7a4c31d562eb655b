// Fibers of one thread, and the scheduler they return to. Switches use setjmp and longjmp:
// swapcontext() makes a system call, which took a third of the emulator's time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>

namespace emulator {

constexpr size_t kStackBytes = 64 * 1024;
// Stacks begin at different offsets: powers of two apart, they would share a few lines of caches.
constexpr size_t kOffsets = 48, kOffsetBytes = 17 * 64;

inline jmp_buf scheduler;

class Context {
 public:
  // Prepare a fiber. `run` must end with leave(), after which the fiber is not resumed.
  void start(void (*run)()) {
    static size_t started;
    stack_ = std::make_unique_for_overwrite<char[]>(kStackBytes + kOffsets * kOffsetBytes);
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack_.get() + started++ % kOffsets * kOffsetBytes;
    start_.uc_stack.ss_size = kStackBytes;
    start_.uc_link = nullptr;
    makecontext(&start_, run, 0);
  }
  // Run the fiber until it leaves.
  void resume() {
    if (_setjmp(scheduler)) return;
    if (started_) _longjmp(at_, 1);
    started_ = true;
    setcontext(&start_);
  }
  // Called by the fiber: return to the scheduler until resumed.
  void leave() {
    if (_setjmp(at_)) return;
    _longjmp(scheduler, 1);
  }

 private:
  ucontext_t start_;
  jmp_buf at_;
  bool started_ = false;
  std::unique_ptr<char[]> stack_;
};

}  // namespace emulator
