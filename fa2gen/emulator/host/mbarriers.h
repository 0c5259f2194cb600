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
  Site site;                           // of its initialisation, by that thread in that epoch
  unsigned tid;
  uint32_t fenced = 0;                 // that thread's epoch of fence_mbarrier_init; 0 for none
  uint32_t expected = 0;               // bytes that the current phase expects and that no copy has been issued for
  uint32_t in_flight = 0;              // bytes of copies that have not landed
  bool has_bytes = false;              // copies have been issued for the current phase
  bool had_bytes = false;              // and were for the phase before
  uint32_t phase = 0;                  // phases completed
  Knowledge joining = {};              // what the arrivals of the current phase have released
  Knowledge joined = {};               // what those of the phase before did
  std::vector<unsigned> waiters = {};  // threads, in mbarrier_wait

  // Has its initialisation been fenced for bulk copies, and is that ordered before now?
  bool fenced_before(Accessor who) const { return fenced && (who.tid == tid || who.knows(tid, fenced)); }
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
  Mbarriers(SharedMemory& shared, bool checks) : shared_(shared), checks_(checks) {}

  void reset() { all_.clear(); }
  bool empty() const { return all_.empty(); }
  Mbarrier& operator[](size_t i) { return all_[i]; }
  const std::vector<Mbarrier>& all() const { return all_; }

  static constexpr uint32_t kMostBytes = (1u << 20) - 1;

  void init(unsigned address, int count, size_t agent, Accessor who, Site site) {
    shared_.check_range(address, 8, "mbarrier_init", who);
    if (count < 1 || count >= 1 << 20)
      throw Diagnostic("mbarrier-count", format("mbarrier_init of %s with a count of %d; 1 to 1048575 are possible",
                                                shared_.place(address).c_str(), count));
    for (const Mbarrier& m : all_)
      if (m.address == address)
        throw Diagnostic("mbarrier-initialised-twice",
                         format("mbarrier_init of %s, which is an mbarrier", shared_.place(address).c_str()));
    shared_.make_mbarrier(address, who, site);
    all_.push_back({address, count, agent, count, site, who.tid});
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

  void fence_init(Accessor who) {
    for (Mbarrier& m : all_)
      if (m.tid == who.tid && m.fenced == 0) m.fenced = who.epoch();
  }

  void expect(Mbarrier& m, uint32_t bytes) {
    if (uint64_t(m.expected) + m.in_flight + bytes > kMostBytes)
      throw Diagnostic("mbarrier-tx-count",
                       format("mbarrier_arrive_expect_tx on %s of %u bytes; a phase may wait for %u at most",
                              shared_.place(m.address).c_str(), bytes, kMostBytes));
    m.expected += bytes;
  }
  // A copy of so many bytes is issued.
  void begin_bytes(Mbarrier& m, uint32_t bytes, Accessor who) {
    if (checks_ && !m.fenced_before(who))
      throw Diagnostic("mbarrier-init-not-fenced",
                       format("tma_load arrives on %s, initialised by thread %u at %s without a fence_mbarrier_init "
                              "before the barrier that followed",
                              shared_.place(m.address).c_str(), m.tid, site_name(m.site).c_str()));
    if (bytes > m.expected)
      throw Diagnostic("mbarrier-tx-count",
                       format("tma_load brings %u bytes, but phase %u of %s expects %u more: "
                              "mbarrier_arrive_expect_tx comes before the copies, with the bytes of all of them",
                              bytes, m.phase, shared_.place(m.address).c_str(), m.expected));
    m.expected -= bytes, m.in_flight += bytes;
    m.has_bytes = true;
  }
  // They have landed; true if that completes the phase.
  bool end_bytes(Mbarrier& m, uint32_t bytes) {
    m.in_flight -= bytes;
    return complete(m);
  }

  // Counts an arrival, made at `site` by a thread that knew `known` of the phases; true if it completes the phase.
  bool arrive(Mbarrier& m, const Knowledge& known, const char* what, Site site, unsigned tid) {
    // An arrival that may come before the end of the phase before might count there.
    if (checks_ && (m.count > 1 || m.had_bytes) && m.phase > 0 && known[m.agent] < m.phase)
      throw Diagnostic(
          "mbarrier-over-arrival",
          format("%s at %s on %s, but phase %u had its %d arrivals and this thread had not learnt of it: the arrival "
                 "may count for either phase",
                 what, site_name(site).c_str(), shared_.place(m.address).c_str(), m.phase - 1, m.count),
          int(tid));
    if (m.pending == 0)
      throw Diagnostic("mbarrier-over-arrival",
                       format("%s at %s on %s, whose phase %u has had its %d arrivals and waits for bytes only", what,
                              site_name(site).c_str(), shared_.place(m.address).c_str(), m.phase, m.count),
                       int(tid));
    m.pending--;
    return complete(m);
  }

  // A phase that has had its arrivals and waits for bytes that nobody brings.
  static bool lacks_copies(const Mbarrier& m) { return m.expected > 0 && m.in_flight == 0; }

  std::string state(const Mbarrier& m) const {
    std::string text = format("mbarrier %s (shared address base+0x%x): phase %u lacks %d of %d arrivals",
                              shared_.place(m.address).c_str(), m.address - kSmemBase, m.phase, m.pending, m.count);
    if (m.expected || m.in_flight)
      text += format(" and %u bytes, of which copies in flight bring %u", m.expected + m.in_flight, m.in_flight);
    return text;
  }

 private:
  static bool complete(Mbarrier& m) {
    if (m.pending || m.expected || m.in_flight) return false;
    m.pending = m.count;
    m.had_bytes = m.has_bytes, m.has_bytes = false;
    m.phase++;
    m.joining.raise(m.agent, m.phase);
    m.joined = std::move(m.joining);
    m.joining.clear();
    return true;
  }

  SharedMemory& shared_;
  bool checks_;
  std::vector<Mbarrier> all_;
};

}  // namespace emulator
