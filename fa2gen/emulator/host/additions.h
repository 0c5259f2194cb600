// Additions of floats in global memory. Their order is free unless semaphores order them: in a launch without, they are
// held back and made in a random order when it ends, those of all blocks together. In a launch with semaphores they are
// made at once, and two on one element that nothing orders are a fault.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "diagnostic.h"
#include "global_memory.h"

namespace emulator {

struct Addition {
  float* address;
  float value;
};

// Who added to an element last.
struct Adder {
  uint32_t block = 0;  // 1 + its number; 0 for nobody
  uint32_t tid = 0, epoch = 0;
  Site site{0};
};

class Additions {
 public:
  // Beyond so many (16 bytes each) a block's additions are made when it ends, in random order too.
  static constexpr size_t kMostHeld = size_t(1) << 22;

  explicit Additions(size_t num_buffers) : sums_(new Sums[num_buffers]) {}

  // What is known of an element, by the place of its buffer, for as long as the lock is held.
  Adder& last_adder(size_t buffer, const GlobalBuffer& memory, const float* address) {
    Sums& sums = sums_[buffer];
    std::call_once(sums.made, [&] { sums.adders.resize(memory.bytes / 4 + 1); });
    return sums.adders[size_t(reinterpret_cast<const uint8_t*>(address) - memory.data) / 4];
  }
  std::unique_lock<std::mutex> lock(const float* address) {
    return std::unique_lock<std::mutex>(locks_[reinterpret_cast<uintptr_t>(address) / 64 % kLocks]);
  }

  // The first two additions without an order; a fault if the launch has semaphores.
  bool has_unordered() const { return has_unordered_; }
  void note_unordered(const Diagnostic& fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!unordered_) unordered_ = fault;
    has_unordered_ = true;
  }

  // A block ends: takes its additions.
  void hold(unsigned block, std::vector<Addition>& additions, uint64_t random) {
    if (additions.empty()) return;
    if ((held_ += additions.size()) > kMostHeld) {
      make(additions, random);
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    of_blocks_.emplace_back(block, std::move(additions));
    additions.clear();
  }
  // Makes them in random order.
  void make(std::vector<Addition>& additions, uint64_t random) {
    random |= 1;
    for (size_t i = additions.size(); i > 1; i--) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      std::swap(additions[i - 1], additions[random % i]);
    }
    make_in_order(additions);
  }
  void make_in_order(std::vector<Addition>& additions) {
    for (const Addition& a : additions) {
      auto held = lock(a.address);
      *a.address += a.value;
    }
    additions.clear();
  }
  // The launch ends. The order follows from the seed, whatever OS thread ran which block.
  void finish(bool semaphores, uint64_t seed) {
    if (semaphores && unordered_) throw *unordered_;
    std::sort(of_blocks_.begin(), of_blocks_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Addition> all;
    for (const auto& [block, additions] : of_blocks_) all.insert(all.end(), additions.begin(), additions.end());
    of_blocks_.clear();
    if (semaphores)
      make_in_order(all);
    else
      make(all, seed * 0x9e3779b97f4a7c15ull);
  }

 private:
  static constexpr size_t kLocks = 64;
  struct Sums {
    std::once_flag made;
    std::vector<Adder> adders;
  };

  std::unique_ptr<Sums[]> sums_;
  std::mutex locks_[kLocks], mutex_;
  std::atomic<size_t> held_{0};
  std::atomic<bool> has_unordered_{false};
  std::optional<Diagnostic> unordered_;
  std::vector<std::pair<unsigned, std::vector<Addition>>> of_blocks_;
};

}  // namespace emulator
