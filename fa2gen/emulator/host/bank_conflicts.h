// Counts shared-memory bank conflicts of one warp's plain accesses. Lanes are fibers and reach an access one after
// another, so accesses are collected until the next collective, and the n-th access of every lane at one place in the
// text is taken to be one instruction. Where some lanes skip the place once and others do not, accesses of different
// instructions meet: such counts are estimates.
//
// Model: 32 banks of 4 bytes; an instruction moves 128 bytes a cycle, so 16-byte accesses go 8 lanes at a time and
// 8-byte ones 16 lanes; a cycle more for every further distinct word in one bank.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "diagnostic.h"

namespace emulator {

class BankConflicts {
 public:
  void record(Site site, unsigned lane, unsigned address, unsigned bytes, uint64_t* counter) {
    Instruction& instruction = find(site, counter);
    instruction.bytes = bytes;
    const unsigned round = instruction.next[lane]++;
    if (round == instruction.rounds) {
      if (instruction.addresses.size() == round) instruction.addresses.emplace_back();
      instruction.addresses[instruction.rounds++].fill(kAbsent);
    }
    instruction.addresses[round][lane] = address;
    pending_ = true;
    if (round == kMaxRounds) flush();
  }

  void flush() {
    if (!pending_) return;
    for (Instruction& instruction : instructions_) {
      for (unsigned round = 0; round < instruction.rounds; round++)
        *instruction.counter += conflicts(instruction.addresses[round], instruction.bytes);
      instruction.rounds = 0;
      instruction.next.fill(0);
    }
    pending_ = false;
  }

 private:
  static constexpr unsigned kAbsent = ~0u, kMaxRounds = 1024;
  using Addresses = std::array<unsigned, 32>;
  struct Instruction {
    Site site;
    uint64_t* counter;
    unsigned bytes = 0, rounds = 0;
    std::array<unsigned, 32> next{};
    std::vector<Addresses> addresses;
  };

  Instruction& find(Site site, uint64_t* counter) {
    for (size_t i = 0; i < instructions_.size(); i++) {
      recent_ = recent_ < instructions_.size() ? recent_ : 0;
      if (instructions_[recent_].site == site && instructions_[recent_].counter == counter)
        return instructions_[recent_];
      recent_++;
    }
    recent_ = instructions_.size();
    instructions_.push_back({site, counter, 0, 0, {}, {}});
    return instructions_.back();
  }

  static unsigned conflicts(const Addresses& addresses, unsigned bytes) {
    const unsigned unit = std::max(bytes, 4u), lanes = std::min(128 / unit, 32u);
    unsigned extra = 0;
    for (unsigned first = 0; first < 32; first += lanes) {
      unsigned distinct[32], slots[32] = {}, count = 0, most = 1;
      for (unsigned lane = first; lane < first + lanes; lane++) {
        if (addresses[lane] == kAbsent) continue;
        const unsigned word = addresses[lane] / unit;
        if (std::find(distinct, distinct + count, word) != distinct + count) continue;
        distinct[count++] = word;
        most = std::max(most, ++slots[word % lanes]);
      }
      extra += most - 1;
    }
    return extra;
  }

  std::vector<Instruction> instructions_;
  size_t recent_ = 0;
  bool pending_ = false;
};

}  // namespace emulator
