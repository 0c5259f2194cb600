// The mbarriers of a block: their phases, and what completing one orders. Who waits, and when asynchronous arrivals
// happen, is the block's affair.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "diagnostic.h"
#include "shared_memory.h"
#include "thread_clock.h"

namespace emulator {

struct Mbarrier {
  unsigned address;
  int count;
  size_t agent;                        // its place in Knowledge
  int pending;                         // arrivals that the current phase still needs
  uint32_t phase = 0;                  // phases completed
  Knowledge joining = {};              // what the arrivals of the current phase have released
  Knowledge joined = {};               // what those of the phase before did
  std::vector<unsigned> waiters = {};  // threads, in mbarrier_wait
};

// A cp_async_mbarrier_arrive whose copies have not landed.
struct AsyncArrival {
  unsigned tid, mbarrier;
  uint32_t batch;
  Knowledge known;  // of phases, when it was issued
  Site site;
};

class Mbarriers {
 public:
  Mbarriers(SharedMemory& shared, unsigned num_threads, bool checks)
      : shared_(shared), num_threads_(num_threads), checks_(checks) {}

  void reset() { all_.clear(); }
  bool empty() const { return all_.empty(); }
  Mbarrier& operator[](size_t i) { return all_[i]; }
  const std::vector<Mbarrier>& all() const { return all_; }

  void init(unsigned address, int count, Accessor who, Site site) {
    shared_.check_range(address, 8, "mbarrier_init", who);
    if (count < 1 || count >= 1 << 20)
      throw Diagnostic("mbarrier-count", format("mbarrier_init of %s with a count of %d; 1 to 1048575 are possible",
                                                shared_.place(address).c_str(), count));
    for (const Mbarrier& m : all_)
      if (m.address == address)
        throw Diagnostic("mbarrier-initialised-twice",
                         format("mbarrier_init of %s, which is an mbarrier", shared_.place(address).c_str()));
    shared_.make_mbarrier(address, who, site);
    all_.push_back({address, count, 2 * size_t(num_threads_) + all_.size(), count});
  }

  // The place of the mbarrier in the list.
  unsigned find(unsigned address, Accessor who, const char* what) const {
    shared_.check_range(address, 8, what, who);
    for (size_t i = 0; i < all_.size(); i++) {
      if (all_[i].address != address) continue;
      shared_.use_mbarrier(address, who, what);
      return unsigned(i);
    }
    throw Diagnostic("mbarrier-not-initialised",
                     format("%s on %s, where no mbarrier was initialised", what, shared_.place(address).c_str()));
  }

  // Counts an arrival, made at `site` by a thread that knew `known` of the phases; true if it completes the phase.
  bool arrive(Mbarrier& m, const Knowledge& known, const char* what, Site site, unsigned tid) {
    // An arrival that may come before the end of the phase before might count there.
    if (checks_ && m.count > 1 && known[m.agent] < m.phase)
      throw Diagnostic(
          "mbarrier-over-arrival",
          format("%s at %s on %s, but phase %u had its %d arrivals and this thread had not learnt of it: the arrival "
                 "may count for either phase",
                 what, site_name(site).c_str(), shared_.place(m.address).c_str(), m.phase - 1, m.count),
          int(tid));
    if (--m.pending) return false;
    m.pending = m.count;
    m.phase++;
    m.joining.raise(m.agent, m.phase);
    m.joined = std::move(m.joining);
    m.joining.clear();
    return true;
  }

  std::string state(const Mbarrier& m) const {
    return format("mbarrier %s (shared address base+0x%x): phase %u lacks %d of %d arrivals",
                  shared_.place(m.address).c_str(), m.address - kSmemBase, m.phase, m.pending, m.count);
  }

 private:
  SharedMemory& shared_;
  unsigned num_threads_;
  bool checks_;
  std::vector<Mbarrier> all_;
};

}  // namespace emulator
