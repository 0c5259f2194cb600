// Shared memory's shadow once single threads are ordered, and what is said of a fault.
#include "shared_memory.h"

namespace emulator {

void SharedMemory::make_mbarrier(unsigned address, Accessor who, Site site) {
  write(address, 8, who, false, "mbarrier_init", site);
  if (!checks_) return;
  order_lanes();
  for (unsigned i = 0; i < 2; i++) words_[(address - kSmemBase) / 4 + i].mbarrier = true;
}

void SharedMemory::use_mbarrier(unsigned address, Accessor who, const char* what) const {
  const Word& word = words_[(address - kSmemBase) / 4];
  if (checks_ && !ordered_by_lanes(word, who))
    throw Diagnostic("mbarrier-init-not-visible",
                     format("%s on the mbarrier %s, initialised by %s, with no barrier between", what,
                            place(address).c_str(), writer_name(word).c_str()));
}

bool SharedMemory::ordered_by_lanes(const Word& word, Accessor who) const {
  if (word.by_tma) return who.own->known[word.writer] >= word.write_epoch;
  if (word.in_batch) return who.own->known[num_warps_ * kWarpSize + word.writer] >= word.write_epoch;
  return word.writer == who.tid || who.knows(word.writer, word.write_epoch);
}

void SharedMemory::read_by_lanes(unsigned address, unsigned bytes, Accessor who, const char* what, Site site,
                                 bool collective) {
  if (has_async_) touch_chunk(address, false, who, what);
  const unsigned first = (address - kSmemBase) / 4, last = (address - kSmemBase + bytes - 1) / 4;
  const uint8_t need = byte_mask(address, bytes);
  for (unsigned i = first; i <= last; i++) {
    Word& word = words_[i];
    if (word.mbarrier) mbarrier_touched(i, who, what);
    if (word.in_flight || (word.initialised & need) != need || !ordered_by_lanes(word, who))
      read_failed(i, need, who, what);
    word.read_site = site;
    lane_reads_.read(i, who, collective);
  }
}

void SharedMemory::write_by_lanes(unsigned address, unsigned bytes, Accessor who, bool copy, const char* what,
                                  Site site) {
  if (has_async_) touch_chunk(address, true, who, what);
  const unsigned first = (address - kSmemBase) / 4, last = (address - kSmemBase + bytes - 1) / 4;
  const uint8_t set = byte_mask(address, bytes);
  for (unsigned i = first; i <= last; i++) {
    Word& word = words_[i];
    if (word.mbarrier) mbarrier_touched(i, who, what);
    if (word.in_flight || (word.initialised && !ordered_by_lanes(word, who))) write_failed(i, what);
    // Reads before the first mbarrier are known by warp.
    int reader = unordered_warp(i, who);
    if (reader < 0) reader = lane_reads_.unordered(i, who);
    if (reader >= 0) write_raced(i, unsigned(reader), what);
    lane_reads_.forget(i);
    word.write_epoch = who.epoch();
    word.writer = uint16_t(who.tid);
    word.write_site = site;
    word.in_flight = word.by_copy = copy;
    word.in_batch = word.by_tma = false;
    word.initialised |= set;
  }
}

void SharedMemory::read_failed(unsigned i, uint8_t need, Accessor who, const char* what) const {
  const Word& word = words_[i];
  const int tid = int(who.tid);
  if (word.in_flight)
    throw Diagnostic("cp-async-not-waited",
                     format("%s reads %s, where the cp.async of %s is in flight", what, word_name(i).c_str(),
                            writer_name(word).c_str()),
                     tid);
  if ((word.initialised & need) != need)
    throw Diagnostic("shared-uninitialised-read", format("%s reads %s, which nobody wrote", what, word_name(i).c_str()),
                     tid);
  if (word.by_tma)
    throw Diagnostic("tma-load-not-waited",
                     format("%s reads %s, which %s brought: it has landed, but its mbarrier was not waited for", what,
                            word_name(i).c_str(), writer_name(word).c_str()),
                     tid);
  throw Diagnostic("shared-race-read-after-write",
                   format("%s reads %s, written by %s%s, with no barrier between", what, word_name(i).c_str(),
                          writer_name(word).c_str(),
                          word.in_batch  ? " (cp.async, landed, but its mbarrier was not waited for)"
                          : word.by_copy ? " (cp.async, waited for by its own thread only)"
                                         : ""),
                   tid);
}

void SharedMemory::write_failed(unsigned i, const char* what) const {
  const Word& word = words_[i];
  if (word.in_flight)
    throw Diagnostic("cp-async-overwrite", format("%s at %s, where the cp.async of %s is in flight", what,
                                                  word_name(i).c_str(), writer_name(word).c_str()));
  if (word.by_tma)
    throw Diagnostic("tma-load-overwrite",
                     format("%s at %s, which %s brought: it has landed, but its mbarrier was not waited for", what,
                            word_name(i).c_str(), writer_name(word).c_str()));
  throw Diagnostic("shared-race-write-after-write", format("%s at %s, written by %s, with no barrier between", what,
                                                           word_name(i).c_str(), writer_name(word).c_str()));
}

void SharedMemory::write_raced(unsigned i, unsigned warp, const char* what) const {
  throw Diagnostic("shared-race-write-after-read",
                   format("%s at %s, which warp %u read (last read at %s), with no barrier between", what,
                          word_name(i).c_str(), warp, site_name(words_[i].read_site).c_str()));
}

void SharedMemory::mbarrier_touched(unsigned i, Accessor who, const char* what) const {
  throw Diagnostic("mbarrier-plain-access",
                   format("%s at %s, which is an mbarrier since %s", what, word_name(i).c_str(),
                          site_name(words_[i].write_site).c_str()),
                   int(who.tid));
}

}  // namespace emulator
