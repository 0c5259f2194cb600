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

namespace emulator {

constexpr unsigned kWarpSize = 32, kMaxWarps = 32;

// The newest epoch known of each agent; absent ones are 0. With T threads, agents are the threads, T + t the
// asynchronous copies of thread t (epochs are their batches), and 2 T + m mbarrier m (epochs are its phases completed).
// Of other blocks a thread knows what its block's threads have acquired by semaphores (semaphores.h): for each of these
// threads, by how many of its waits.
class Knowledge {
 public:
  uint32_t operator[](size_t agent) const { return agent < epochs_.size() ? epochs_[agent] : 0; }
  void clear() { epochs_.clear(), waits_.clear(); }
  void raise(size_t agent, uint32_t epoch) { raise(epochs_, agent, epoch); }
  uint32_t waits(size_t waiter) const { return waiter < waits_.size() ? waits_[waiter] : 0; }
  void raise_waits(size_t waiter, uint32_t count) { raise(waits_, waiter, count); }
  void join(const Knowledge& other) {
    join(epochs_, other.epochs_, 0);
    join(waits_, other.waits_, 0);
  }
  // Only epochs, of agents from `first` on.
  void join_epochs(const Knowledge& other, size_t first) { join(epochs_, other.epochs_, first); }

 private:
  using Epochs = std::vector<uint32_t>;
  static void raise(Epochs& epochs, size_t i, uint32_t epoch) {
    if (i >= epochs.size()) epochs.resize(i + 1);
    epochs[i] = std::max(epochs[i], epoch);
  }
  static void join(Epochs& epochs, const Epochs& others, size_t first) {
    if (others.size() > epochs.size()) epochs.resize(others.size());
    for (size_t i = first; i < others.size(); i++) epochs[i] = std::max(epochs[i], others[i]);
  }

  Epochs epochs_, waits_;
};

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
