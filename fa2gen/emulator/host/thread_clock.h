// What is ordered before what: vector clocks.
//
// Each warp counts epochs, advanced by barriers and sync_warp, and has a clock: the newest epoch of every other warp
// that is ordered before now. That is all there is while only whole warps synchronise. Mbarriers and semaphores order
// single threads: a thread that arrives or releases begins an epoch of its own, ahead of its warp's until the warp
// synchronises again, and one that waits knows more than its warp's clock says.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "knowledge.h"

namespace emulator {

constexpr unsigned kWarpSize = 32, kMaxWarps = 32;

struct ThreadClock {
  uint32_t ahead = 0;  // epochs ahead of its warp's
  Knowledge known;  // beyond its warp's clock
};

// The copies of one thread that mbarriers track.
struct CopyBatches {
  struct Batch {
    uint32_t number;
    unsigned group;  // of its copies
  };
  uint32_t count = 0;
  std::vector<Batch> not_waited;  // which cp_async_wait has not covered; of each group the newest

  void begin(unsigned group) {
    if (!not_waited.empty() && not_waited.back().group == group) not_waited.pop_back();
    not_waited.push_back({++count, group});
  }
};

// Who makes an access: a thread, its warp's clock (clock[own warp] is the warp's current epoch), and its own.
struct Accessor {
  unsigned tid;
  const uint32_t* clock;
  const ThreadClock* own;

  unsigned warp() const { return tid / kWarpSize; }
  uint32_t epoch() const { return clock[warp()] + own->ahead; }
  // The newest epoch of a warp whose accesses, of every lane, are ordered before now.
  uint32_t known_of_warp(unsigned w) const { return w == warp() ? clock[w] - 1 : clock[w]; }
  // Is the given epoch of a thread ordered before now?
  bool knows(unsigned thread, uint32_t epoch) const {
    return epoch <= known_of_warp(thread / kWarpSize) || epoch <= own->known[thread];
  }
  // Adds all that this thread knows, and its own current epoch: what a release publishes.
  void publish(Knowledge& to, unsigned num_threads) const {
    to.join(own->known);
    for (unsigned t = num_threads; t-- > 0;) to.raise(t, known_of_warp(t / kWarpSize));
    to.raise(tid, epoch());
  }
};

}  // namespace emulator
