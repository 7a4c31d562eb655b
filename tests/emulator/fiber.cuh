// Fibers of a thread, and their way back to whoever goes on with one. Between them a jump does:
// swapcontext() would ask the kernel each time, which was a third of what the emulator took.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <vector>

namespace emulator {

inline jmp_buf scheduler;

class Context {
 public:
  // `run` is to end with leave(), and its fiber not gone on with then.
  void begin_with(void (*run)()) {
    stack_.resize(64 * 1024);
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack_.data();
    start_.uc_stack.ss_size = stack_.size();
    start_.uc_link = nullptr;
    makecontext(&start_, run, 0);
  }
  // Until the fiber leaves.
  void go_on() {
    if (_setjmp(scheduler)) return;
    if (started_) _longjmp(at_, 1);
    started_ = true;
    setcontext(&start_);
  }
  // From the fiber, until it is gone on with.
  void leave() {
    if (_setjmp(at_)) return;
    _longjmp(scheduler, 1);
  }

 private:
  ucontext_t start_;
  jmp_buf at_;
  bool started_ = false;
  std::vector<char> stack_;
};

}  // namespace emulator
