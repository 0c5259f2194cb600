// Who read each word of shared memory since it was written, lane by lane: kept once a block has an mbarrier, which
// orders single threads. Before that, the newest epoch of each warp is enough (shared_memory.h).
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "thread_clock.h"

namespace emulator {

class LaneReads {
 public:
  using Epochs = std::array<uint32_t, kWarpSize>;

  void stop() { pages_.clear(), slots_.clear(), lanes_.clear(), collectives_.clear(), known_.clear(); }
  void start(size_t words, unsigned num_warps) {
    num_warps_ = num_warps;
    pages_.assign(words / kPageWords + 1, kNoPage);
    slots_.clear();
    lanes_.assign(1, Epochs{});
    collectives_.assign(num_warps, std::vector<Collective>(1));
    known_.assign(size_t(num_warps) * num_warps * kWarpSize, 0);
  }

  // The epochs of a warp's lanes at an ldmatrix, whose reads follow.
  void begin_collective(unsigned warp, const Epochs& epochs) {
    if (collectives_[warp].back().epochs != epochs)
      collectives_[warp].push_back({epochs, *std::max_element(epochs.begin(), epochs.end())});
  }

  void read(size_t word, Accessor who, bool collective) {
    uint32_t& page = pages_[word / kPageWords];
    if (page == kNoPage) {
      page = uint32_t(slots_.size());
      slots_.resize(slots_.size() + kPageWords * num_warps_);
    }
    Slot& slot = slots_of(word)[who.warp()];
    if (collective) {  // by every lane, and later than any other ldmatrix of the warp
      slot.collective = uint32_t(collectives_[who.warp()].size()) - 1;
      slot.newest = std::max(slot.newest, collectives_[who.warp()].back().newest);
      return;
    }
    if (slot.lanes == 0) {
      slot.lanes = uint32_t(lanes_.size());
      lanes_.emplace_back();
      lanes_.back().fill(0);
    }
    lanes_[slot.lanes][who.tid % kWarpSize] = who.epoch();
    slot.newest = std::max(slot.newest, who.epoch());
  }

  // A warp with a read of the word that is not ordered before now, or -1. A store does not overtake an ldmatrix of its
  // own warp.
  int unordered(size_t word, Accessor who) {
    if (pages_[word / kPageWords] == kNoPage) return -1;
    const Slot* slots = slots_of(word);
    for (unsigned w = 0; w < num_warps_; w++) {
      const Slot& slot = slots[w];
      if (slot.newest <= who.known_of_warp(w)) continue;
      if (slot.lanes && !knows(who, w, lanes_[slot.lanes])) return int(w);
      // What a thread knows it never forgets.
      uint32_t& known = known_[who.tid * num_warps_ + w];
      if (w == who.warp() || slot.collective <= known) continue;
      if (!knows(who, w, collectives_[w][slot.collective].epochs)) return int(w);
      known = slot.collective;
    }
    return -1;
  }

  // The word is written: reads before are ordered before that, and so before what follows the write.
  void forget(size_t word) {
    if (pages_[word / kPageWords] == kNoPage) return;
    Slot* slots = slots_of(word);
    for (unsigned w = 0; w < num_warps_; w++) {
      Slot& slot = slots[w];
      if (slot.newest == 0) continue;
      slot.newest = slot.collective = 0;
      if (slot.lanes) lanes_[slot.lanes].fill(0);
    }
  }

 private:
  struct Slot {
    uint32_t newest = 0, lanes = 0,
             collective = 0;  // the newest epoch of any lane; places in the lists below, 0 for none
  };

  // Memory that only TMA and wgmma touch has no slots.
  static constexpr size_t kPageWords = 256;
  static constexpr uint32_t kNoPage = ~0u;
  Slot* slots_of(size_t word) { return &slots_[pages_[word / kPageWords] + word % kPageWords * num_warps_]; }

  struct Collective {
    Epochs epochs{};
    uint32_t newest = 0;
  };

  // Are the given epochs of the warp's other lanes ordered before now?
  static bool knows(Accessor who, unsigned warp, const Epochs& epochs) {
    for (unsigned l = 0; l < kWarpSize; l++)
      if (warp * kWarpSize + l != who.tid && !who.knows(warp * kWarpSize + l, epochs[l])) return false;
    return true;
  }

  unsigned num_warps_ = 0;
  std::vector<uint32_t> pages_;                       // where a page's slots begin, kNoPage before its first read
  std::vector<Slot> slots_;                           // of each page [word][warp]
  std::vector<Epochs> lanes_;                         // of plain reads, the newest of each lane
  std::vector<std::vector<Collective>> collectives_;  // [warp]: ldmatrix, one for each change of its lanes' epochs
  std::vector<uint32_t> known_;                       // [thread][warp]: the newest of these known to be ordered
};

}  // namespace emulator
