// Stacks for the fibers of one block, mapped once for each OS thread and reused from block to block.
#pragma once
#include <sys/mman.h>

#include <cstring>

#include "diagnostic.h"

namespace emulator {

class StackPool {
 public:
  static constexpr size_t kBytes = 64 * 1024;
  explicit StackPool(int count) : bytes_(kSlot * count) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw Diagnostic("out-of-memory", format("no memory for %d stacks", count));
    base_ = static_cast<unsigned char*>(memory);
    for (int i = 0; i < count; i++) mprotect(base_ + kSlot * i, kGuard, PROT_NONE);
  }
  ~StackPool() { munmap(base_, bytes_); }
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;

  unsigned char* stack(int i) const { return base_ + kSlot * i + kGuard; }
  // Fills the part that kernels use with NaN (in bf16, fp16 and fp32), so that a register array read before it is
  // written shows in the result.
  void poison(int i) const { std::memset(stack(i) + kBytes - kPoisoned, 0xff, kPoisoned); }
  // The index of the stack whose guard page holds address, or -1.
  int overflowed(const void* address) const {
    const unsigned char* at = static_cast<const unsigned char*>(address);
    if (at < base_ || at >= base_ + bytes_) return -1;
    return size_t(at - base_) % kSlot < kGuard ? int((at - base_) / kSlot) : -1;
  }

 private:
  static constexpr size_t kGuard = 64 * 1024;  // a multiple of every page size in use; unmapped below each stack
  static constexpr size_t kSlot = kBytes + kGuard, kPoisoned = 8 * 1024;
  size_t bytes_;
  unsigned char* base_;
};

}  // namespace emulator
