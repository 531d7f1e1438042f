// The threads of a kernel on a CPU: each has a stack, runs until it leaves, and goes on from there. swapcontext would
// ask the system for the mask of signals at every switch, which took most of the time of what is tested this way.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <memory>

namespace on_cpu {

class Coroutine {
 public:
  // Runs `body` when it is first entered; it must not return.
  explicit Coroutine(void (*body)()) {
    getcontext(&first_);
    first_.uc_stack.ss_sp = stack_.get(), first_.uc_stack.ss_size = kStack;
    makecontext(&first_, body, 0);
  }
  Coroutine(const Coroutine&) = delete;

  // Until it leaves. Not inline, nor looked into: globals change meanwhile.
  __attribute__((noipa)) void enter() {
    if (__builtin_setjmp(outside_) != 0) return;
    if (begun_) jump(inside_);
    begun_ = true;
    setcontext(&first_);
  }
  __attribute__((noipa)) void leave() {
    if (__builtin_setjmp(inside_) == 0) jump(outside_);
  }

 private:
  static constexpr int kStack = 64 * 1024;
  [[noreturn]] __attribute__((noipa)) static void jump(void** to) {
    __builtin_longjmp(to, 1);
  }

  ucontext_t first_;
  std::unique_ptr<uint8_t[]> stack_{new uint8_t[kStack]};
  bool begun_ = false;
  void *inside_[5], *outside_[5];
};

}  // namespace on_cpu
