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

#include "async_shadow.h"
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
    by_lanes_ = has_async_ = false;
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
    if (by_lanes_) return read_by_lanes(address, bytes, who, what, site, collective);
    const unsigned warp = who.warp();
    const uint32_t epoch = who.clock[warp];
    const unsigned first = (address - kSmemBase) / 4, last = (address - kSmemBase + bytes - 1) / 4;
    const uint8_t need = byte_mask(address, bytes);
    for (unsigned i = first; i <= last; i++) {
      Word& word = words_[i];
      if (word.in_flight || (word.initialised & need) != need || !ordered(word, who)) read_failed(i, need, who, what);
      word.read_site = site;
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
    if (by_lanes_) return write_by_lanes(address, bytes, who, copy, what, site);
    const unsigned first = (address - kSmemBase) / 4, last = (address - kSmemBase + bytes - 1) / 4;
    const uint8_t set = byte_mask(address, bytes);
    for (unsigned i = first; i <= last; i++) {
      Word& word = words_[i];
      if (word.in_flight || (word.initialised && !ordered(word, who))) write_failed(i, what);
      const int reader = unordered_warp(i, who);
      if (reader >= 0) write_raced(i, unsigned(reader), what);
      word.write_epoch = who.clock[who.warp()];
      word.writer = uint16_t(who.tid);
      word.write_site = site;
      word.in_flight = word.by_copy = copy;
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
  void make_mbarrier(unsigned address, Accessor who, Site site);
  // Throws unless the mbarrier's initialisation is ordered before now.
  void use_mbarrier(unsigned address, Accessor who, const char* what) const;
  // Single threads are ordered from here on: the block has an mbarrier, or something else that orders them.
  void order_lanes() {
    if (!checks_ || by_lanes_) return;
    lane_reads_.start(words_.size(), num_warps_);
    by_lanes_ = true;
  }
  bool orders_lanes() const { return by_lanes_; }
  // The epochs of a warp's lanes at an ldmatrix, whose reads follow; only where lanes are ordered.
  void begin_collective(unsigned warp, const LaneReads::Epochs& epochs) { lane_reads_.begin_collective(warp, epochs); }

  // ---- Asynchronous copies and reads by TMA and wgmma (shared_async.cpp)

  // The first of them is to come; all else below is for blocks that have done so.
  void start_async();
  AsyncShadow& async() { return async_; }
  const AsyncShadow& async() const { return async_; }
  // A tma_load by that thread: its destination belongs to it from here on, until it lands. Returns its number.
  uint32_t begin_load(const BulkLoad& load, Accessor who);
  void land_load(uint32_t number);
  // An asynchronous read of the chunk at the address, from here until who knows the reader's epoch; adds what it needs.
  void read_async(unsigned address, unsigned reader, size_t agent, uint32_t epoch, Accessor who, const char* what,
                  Site site, AsyncNeeds& needs);
  void check_needs(const AsyncNeeds& needs, Accessor who, const char* what) const;
  // The thread's stores so far are visible to the asynchronous proxy, for those who know its epoch.
  void fence_proxy(Accessor who) {
    if (has_async_) async_.fences[who.tid].push_back(who.epoch());
  }
  // The copy whose bytes are at the address, or null.
  const BulkLoad* load_at(unsigned address) const {
    const uint32_t number = has_async_ ? async_.chunks[(address - kSmemBase) / kChunkBytes].load : 0;
    return number ? &async_.loads[number] : nullptr;
  }

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

  void check_inside(unsigned address, unsigned bytes, const char* what) const {
    if (address < kSmemBase || uint64_t(address) + bytes > uint64_t(kSmemBase) + bytes_)
      throw Diagnostic("shared-out-of-range", format("%s of %u bytes at %s; the block has %u bytes", what, bytes,
                                                     place(address).c_str(), bytes_));
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
    bool by_tma : 1;  // writer is the agent of an mbarrier, write_epoch the number of its phases
    Site write_site{0}, read_site{0};
    Word() : in_flight(false), by_copy(false), in_batch(false), mbarrier(false), by_tma(false) {}
  };
  struct Region {
    const char* name;
    unsigned address, bytes;
  };

  static uint8_t byte_mask(unsigned address, unsigned bytes) { return bytes >= 4 ? 15 : address % 4 ? 12 : 3; }

  // Only where whole warps are ordered, as unordered_warp.
  static bool ordered(const Word& word, Accessor who) {
    if (word.writer == who.tid) return true;
    const unsigned w = word.writer / kWarpSize;
    return w == who.warp() ? word.write_epoch < who.clock[w] : word.write_epoch <= who.clock[w];
  }
  // A warp with a read of the word that is not ordered before now, or -1.
  int unordered_warp(unsigned i, Accessor who) const {
    const unsigned warp = who.warp(), lane = who.tid % kWarpSize;
    for (unsigned u = 0; u < num_warps_; u++) {
      const uint32_t read = reads_[i * num_warps_ + u];
      const bool raced = u != warp ? read >> 6 > who.clock[u]
                                   : read >> 6 == who.clock[warp] && read % 64 != lane && read % 64 != kCollective;
      if (raced) return int(u);
    }
    return -1;
  }

  // Where single threads are ordered.
  void read_by_lanes(unsigned address, unsigned bytes, Accessor who, const char* what, Site site, bool collective);
  void write_by_lanes(unsigned address, unsigned bytes, Accessor who, bool copy, const char* what, Site site);
  bool ordered_by_lanes(const Word& word, Accessor who) const;

  // A thread's own access to a chunk that may be the asynchronous proxy's.
  void touch_chunk(unsigned address, bool write, Accessor who, const char* what);
  void spread_load(size_t chunk);
  void overwrite_words(size_t chunk, Accessor who);
  void need_words(size_t chunk, Accessor who, const char* what, AsyncNeeds& needs);
  [[noreturn]] void async_read_failed(size_t chunk, unsigned reader, const char* name, const char* what) const;
  std::string load_name(const BulkLoad& load) const;

  [[noreturn]] void read_failed(unsigned i, uint8_t need, Accessor who, const char* what) const;
  [[noreturn]] void write_failed(unsigned i, const char* what) const;
  [[noreturn]] void write_raced(unsigned i, unsigned warp, const char* what) const;
  [[noreturn]] void mbarrier_touched(unsigned i, Accessor who, const char* what) const;

  std::string word_name(unsigned i) const { return place(kSmemBase + 4 * i); }
  static std::string writer_name(const Word& w) {
    if (w.by_tma) return format("the tma_load at %s", site_name(w.write_site).c_str());
    return format("thread %u (warp %u) at %s", w.writer, w.writer / kWarpSize, site_name(w.write_site).c_str());
  }

  unsigned bytes_, num_warps_;
  bool checks_;
  std::vector<uint8_t> arena_;
  std::vector<Word> words_;
  std::vector<uint32_t> reads_;  // [word][warp]: epoch << 6 | lane; up to the first mbarrier, then lane_reads_
  LaneReads lane_reads_;
  bool by_lanes_ = false, has_async_ = false;
  AsyncShadow async_;
  std::vector<Region> regions_;
};

}  // namespace emulator
