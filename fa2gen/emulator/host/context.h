// Switching stacks. On x86-64 a switch saves six registers; elsewhere it is ucontext's, a system call each
// (measured 3.5 to 5 times slower for a whole kernel).
#pragma once
#include <cstddef>

#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
// void emulator_switch(void** save_stack_pointer_here, void* stack_pointer_to_resume)
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.p2align 4
.weak emulator_switch
.type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

namespace emulator {
class Context {
 public:
  // The next switch to this context calls entry, which never returns, on the given stack.
  void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + bytes);
    top[-1] = nullptr;  // where entry would return to: unwinding stops here
    top[-2] = reinterpret_cast<void*>(entry);
    for (int i = 3; i <= 8; i++) top[-i] = nullptr;  // the six registers that the switch pops
    stack_pointer_ = top - 8;
  }
  static void switch_from_to(Context& from, Context& to) { emulator_switch(&from.stack_pointer_, to.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
};
}  // namespace emulator
#else
#include <ucontext.h>

namespace emulator {
class Context {
 public:
  void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
    getcontext(&state_);
    state_.uc_stack.ss_sp = stack;
    state_.uc_stack.ss_size = bytes;
    state_.uc_link = nullptr;
    makecontext(&state_, entry, 0);
  }
  static void switch_from_to(Context& from, Context& to) { swapcontext(&from.state_, &to.state_); }

 private:
  ucontext_t state_;
};
}  // namespace emulator
#endif
