// A block's shared memory and its shadow: for every 4-byte word who wrote it and when, who read it since, which of its
// bytes are initialised, and whether a cp.async to it is in flight.
//
// "When" is a vector clock (thread_clock.h). An access is ordered before another if the clock says so, whatever order
// the threads happened to run in: a missing barrier is found under every schedule that executes both accesses.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "diagnostic.h"
#include "lane_reads.h"
#include "thread_clock.h"

namespace emulator {

class SharedMemory {
 public:
  SharedMemory(unsigned bytes, unsigned num_warps, bool checks)
      : bytes_(bytes),
        num_warps_(num_warps),
        checks_(checks),
        arena_(bytes + 16),
        words_((bytes + 3) / 4),
        reads_(words_.size() * num_warps) {}

  void reset() {
    std::fill(arena_.begin(), arena_.end(), uint8_t(0xff));  // NaN in bf16, fp16 and fp32
    std::fill(words_.begin(), words_.end(), Word{});
    std::fill(reads_.begin(), reads_.end(), 0u);
    regions_.clear();
    lane_reads_.stop();
  }

  uint8_t* at(unsigned address) { return arena_.data() + (address - kSmemBase); }

  void name_region(const char* name, unsigned address, unsigned bytes) {
    for (const Region& r : regions_)
      if (r.address == address) return;
    regions_.push_back({name, address, bytes});
  }

  // `collective`: one of the reads of an ldmatrix, which later stores of the same warp cannot overtake.
  void read(unsigned address, unsigned bytes, Accessor who, const char* what, Site site, bool collective = false) {
    check_range(address, bytes, what, who);
    if (!checks_) return;
    const unsigned warp = who.warp();
    const uint32_t epoch = who.epoch();
    const unsigned first = (address - kSmemBase) / 4, last = (address - kSmemBase + bytes - 1) / 4;
    const uint8_t need = byte_mask(address, bytes);
    for (unsigned i = first; i <= last; i++) {
      Word& word = words_[i];
      if (word.in_flight || word.mbarrier || (word.initialised & need) != need || !ordered(word, who))
        read_failed(i, need, who, what);
      word.read_site = site;
      if (lane_reads_.active()) {
        lane_reads_.read(i, who, collective);
        continue;
      }
      // The newest epoch in which this warp read the word, and which of its lanes did.
      uint32_t& read = reads_[i * num_warps_ + warp];
      const uint32_t mine = epoch << 6 | (collective ? kCollective : who.tid % kWarpSize);
      if (read == mine) continue;
      if (read >> 6 != epoch || read % 64 == kCollective)
        read = mine;
      else if (!collective)
        read = epoch << 6 | kSeveralLanes;
    }
  }

  void write(unsigned address, unsigned bytes, Accessor who, bool copy, const char* what, Site site) {
    check_range(address, bytes, what, who);
    if (!checks_) return;
    const unsigned warp = who.warp(), lane = who.tid % kWarpSize;
    const unsigned first = (address - kSmemBase) / 4, last = (address - kSmemBase + bytes - 1) / 4;
    const uint8_t set = byte_mask(address, bytes);
    for (unsigned i = first; i <= last; i++) {
      Word& word = words_[i];
      if (word.mbarrier) throw mbarrier_access(i, who, what);
      if (word.in_flight)
        throw Diagnostic("cp-async-overwrite", format("%s at %s, where the cp.async of %s is in flight", what,
                                                      word_name(i).c_str(), writer_name(word).c_str()));
      if (word.initialised && !ordered(word, who))
        throw Diagnostic("shared-race-write-after-write",
                         format("%s at %s, written by %s, with no barrier between", what, word_name(i).c_str(),
                                writer_name(word).c_str()));
      for (unsigned u = 0; u < num_warps_; u++) {
        const uint32_t read = reads_[i * num_warps_ + u];
        const bool raced = u != warp ? read >> 6 > who.clock[u]
                                     : read >> 6 == who.clock[warp] && read % 64 != lane && read % 64 != kCollective;
        if (raced) write_raced(i, u, what);
      }
      if (lane_reads_.active()) {
        const int raced = lane_reads_.unordered(i, who);
        if (raced >= 0) write_raced(i, unsigned(raced), what);
        lane_reads_.forget(i);
      }
      word.write_epoch = who.epoch();
      word.writer = uint16_t(who.tid);
      word.write_site = site;
      word.in_flight = word.by_copy = copy;
      word.in_batch = false;
      word.initialised |= set;
    }
  }

  // A cp.async of 16 bytes has landed: the thread that waited may read it now, others after a barrier.
  void land(unsigned address, Accessor who) {
    if (!checks_) return;
    for (unsigned i = 0; i < 4; i++) {
      Word& word = words_[(address - kSmemBase) / 4 + i];
      word.in_flight = false;
      word.write_epoch = who.epoch();
    }
  }
  // It has landed as part of a batch: whoever knows of the batch may read it.
  void land(unsigned address, uint32_t batch) {
    if (!checks_) return;
    for (unsigned i = 0; i < 4; i++) {
      Word& word = words_[(address - kSmemBase) / 4 + i];
      word.in_flight = false;
      word.in_batch = true;
      word.write_epoch = batch;
    }
  }

  // The 8 bytes become an mbarrier, which plain accesses may not touch.
  void make_mbarrier(unsigned address, Accessor who, Site site) {
    write(address, 8, who, false, "mbarrier_init", site);
    if (!checks_) return;
    if (!lane_reads_.active()) lane_reads_.start(words_.size(), num_warps_);
    for (unsigned i = 0; i < 2; i++) words_[(address - kSmemBase) / 4 + i].mbarrier = true;
  }
  // Throws unless the mbarrier's initialisation is ordered before now.
  void use_mbarrier(unsigned address, Accessor who, const char* what) const {
    const Word& word = words_[(address - kSmemBase) / 4];
    if (checks_ && !ordered(word, who))
      throw Diagnostic("mbarrier-init-not-visible",
                       format("%s on the mbarrier %s, initialised by %s, with no barrier between", what,
                              place(address).c_str(), writer_name(word).c_str()));
  }

  // The epochs of a warp's lanes at an ldmatrix, whose reads follow.
  bool tracks_lanes() const { return lane_reads_.active(); }
  void begin_collective(unsigned warp, const LaneReads::Epochs& epochs) { lane_reads_.begin_collective(warp, epochs); }

  void check_range(unsigned address, unsigned bytes, const char* what, Accessor who) const {
    if (address % bytes)
      throw Diagnostic("shared-misaligned", format("%s of %u bytes at %s", what, bytes, place(address).c_str()),
                       int(who.tid));
    if (address < kSmemBase || uint64_t(address) + bytes > uint64_t(kSmemBase) + bytes_)
      throw Diagnostic(
          "shared-out-of-range",
          format("%s of %u bytes at %s; the block has %u bytes", what, bytes, place(address).c_str(), bytes_),
          int(who.tid));
  }

  std::string place(unsigned address) const {
    for (const Region& r : regions_)
      if (address >= r.address && address < r.address + r.bytes) return format("%s+0x%x", r.name, address - r.address);
    return format("shared address base+0x%x", address - kSmemBase);
  }

 private:
  static constexpr uint32_t kSeveralLanes = 32, kCollective = 33;  // beside lane numbers 0 to 31
  struct Word {
    uint32_t write_epoch = 0;
    uint16_t writer = 0;
    uint8_t initialised = 0;  // a bit for each byte
    bool in_flight : 1, by_copy : 1;
    bool in_batch : 1;  // landed by way of an mbarrier: write_epoch is the batch of the writer's copies
    bool mbarrier : 1;
    Site write_site{0}, read_site{0};
    Word() : in_flight(false), by_copy(false), in_batch(false), mbarrier(false) {}
  };
  struct Region {
    const char* name;
    unsigned address, bytes;
  };

  static uint8_t byte_mask(unsigned address, unsigned bytes) { return bytes >= 4 ? 15 : address % 4 ? 12 : 3; }

  static bool ordered(const Word& word, Accessor who) {
    if (word.in_batch) return who.knows_batch(word.writer, word.write_epoch);
    return word.writer == who.tid || who.knows(word.writer, word.write_epoch);
  }

  [[noreturn]] void read_failed(unsigned i, uint8_t need, Accessor who, const char* what) const {
    const Word& word = words_[i];
    const int tid = int(who.tid);
    if (word.mbarrier) throw mbarrier_access(i, who, what);
    if (word.in_flight)
      throw Diagnostic("cp-async-not-waited",
                       format("%s reads %s, where the cp.async of %s is in flight", what, word_name(i).c_str(),
                              writer_name(word).c_str()),
                       tid);
    if ((word.initialised & need) != need)
      throw Diagnostic("shared-uninitialised-read",
                       format("%s reads %s, which nobody wrote", what, word_name(i).c_str()), tid);
    throw Diagnostic("shared-race-read-after-write",
                     format("%s reads %s, written by %s%s, with no barrier between", what, word_name(i).c_str(),
                            writer_name(word).c_str(),
                            word.in_batch  ? " (cp.async, landed, but its mbarrier was not waited for)"
                            : word.by_copy ? " (cp.async, waited for by its own thread only)"
                                           : ""),
                     tid);
  }
  [[noreturn]] void write_raced(unsigned i, unsigned warp, const char* what) const {
    throw Diagnostic("shared-race-write-after-read",
                     format("%s at %s, which warp %u read (last read at %s), with no barrier between", what,
                            word_name(i).c_str(), warp, site_name(words_[i].read_site).c_str()));
  }
  Diagnostic mbarrier_access(unsigned i, Accessor who, const char* what) const {
    return Diagnostic("mbarrier-plain-access",
                      format("%s at %s, which is an mbarrier since %s", what, word_name(i).c_str(),
                             site_name(words_[i].write_site).c_str()),
                      int(who.tid));
  }

  std::string word_name(unsigned i) const { return place(kSmemBase + 4 * i); }
  static std::string writer_name(const Word& w) {
    return format("thread %u (warp %u) at %s", w.writer, w.writer / kWarpSize, site_name(w.write_site).c_str());
  }

  unsigned bytes_, num_warps_;
  bool checks_;
  std::vector<uint8_t> arena_;
  std::vector<Word> words_;
  std::vector<uint32_t> reads_;  // [word][warp]: epoch << 6 | lane; up to the first mbarrier, then lane_reads_
  LaneReads lane_reads_;
  std::vector<Region> regions_;
};

}  // namespace emulator
