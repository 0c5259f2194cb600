// Shared memory as the asynchronous proxy uses it: what a copy by TMA, a wgmma or a thread's own access may rely on.
#include "shared_memory.h"

namespace emulator {

void SharedMemory::start_async() {
  if (!checks_ || has_async_) return;
  order_lanes();
  async_.start((bytes_ + kChunkBytes - 1) / kChunkBytes, num_warps_ * kWarpSize);
  has_async_ = true;
}

std::string SharedMemory::load_name(const BulkLoad& load) const {
  return format("the tma_load of thread %u at %s", load.tid, site_name(load.site).c_str());
}

uint32_t SharedMemory::begin_load(const BulkLoad& load, Accessor who) {
  const unsigned address = load.box.address, bytes = load.box.map.bytes();
  std::memset(at(address), 0xff, bytes);
  if (!has_async_) return 0;
  const uint32_t number = uint32_t(async_.loads.size());
  uint32_t known_load = 0;
  const size_t first = (address - kSmemBase) / kChunkBytes;
  for (size_t i = first; i < first + bytes / kChunkBytes; i++) {
    AsyncShadow::Chunk& chunk = async_.chunks[i];
    if (chunk.readers) {
      const int reader = async_.reading(i, who.own->known);
      if (reader >= 0) async_read_failed(i, unsigned(reader), "tma-load-over-read", "tma_load");
    }
    if (chunk.state == AsyncShadow::State::kWords) {
      overwrite_words(i, who);
    } else if (chunk.load != known_load) {
      const BulkLoad& before = async_.loads[chunk.load];
      if (chunk.state == AsyncShadow::State::kInFlight || who.own->known[before.agent] < before.phase)
        throw Diagnostic(
            "tma-load-over-write",
            format("tma_load to %s, %s", word_name(unsigned(4 * i)).c_str(),
                   chunk.state == AsyncShadow::State::kInFlight
                       ? format("where %s is in flight", load_name(before).c_str()).c_str()
                       : format("which %s brought, without having waited for its mbarrier", load_name(before).c_str())
                             .c_str()));
      known_load = chunk.load;
    }
    chunk = {number, AsyncShadow::State::kInFlight, 0};
  }
  async_.loads.push_back(load);
  return number;
}

// What threads did with a chunk is over, as far as the thread knows that starts a copy over it.
void SharedMemory::overwrite_words(size_t chunk, Accessor who) {
  for (unsigned i = unsigned(4 * chunk); i < 4 * chunk + 4; i++) {
    Word& word = words_[i];
    if (word.mbarrier) mbarrier_touched(i, who, "tma_load");
    if (word.in_flight) write_failed(i, "tma_load");
    if (word.initialised && !ordered_by_lanes(word, who))
      throw Diagnostic("tma-load-over-write", format("tma_load to %s, written by %s, with no barrier between",
                                                     word_name(i).c_str(), writer_name(word).c_str()));
    if (word.initialised && !word.by_tma) {
      const uint32_t fence = word.in_batch ? 0 : async_.fence_after(word.writer, word.write_epoch);
      if (fence == 0 || (word.writer != who.tid && !who.knows(word.writer, fence)))
        throw Diagnostic("proxy-fence-missing",
                         format("tma_load to %s, written by %s, which executed no fence_proxy_async between the two",
                                word_name(i).c_str(), writer_name(word).c_str()));
    }
    int reader = unordered_warp(i, who);
    if (reader < 0) reader = lane_reads_.unordered(i, who);
    if (reader >= 0)
      throw Diagnostic("tma-load-over-read",
                       format("tma_load to %s, which warp %d read (last read at %s), with no barrier between",
                              word_name(i).c_str(), reader, site_name(word.read_site).c_str()));
    lane_reads_.forget(i);
  }
}

void SharedMemory::land_load(uint32_t number) {
  if (!has_async_) return;
  const Box& box = async_.loads[number].box;
  const size_t first = (box.address - kSmemBase) / kChunkBytes;
  for (size_t i = first; i < first + box.map.bytes() / kChunkBytes; i++)
    async_.chunks[i].state = AsyncShadow::State::kLanded;
}

void SharedMemory::read_async(unsigned address, unsigned reader, size_t agent, uint32_t epoch, Accessor who,
                              const char* what, Site site, AsyncNeeds& needs) {
  check_range(address, kChunkBytes, what, who);
  if (!has_async_) return;
  const size_t i = (address - kSmemBase) / kChunkBytes;
  AsyncShadow::Chunk& chunk = async_.chunks[i];
  switch (chunk.state) {
    case AsyncShadow::State::kInFlight:
      throw Diagnostic("tma-load-not-waited",
                       format("%s reads %s, where %s is in flight", what, word_name(unsigned(4 * i)).c_str(),
                              load_name(async_.loads[chunk.load]).c_str()));
    case AsyncShadow::State::kLanded:
      if (needs.loads.empty() || needs.loads.back().number != chunk.load)
        needs.add(chunk.load, async_.loads[chunk.load]);
      break;
    case AsyncShadow::State::kWords:
      need_words(i, who, what, needs);
  }
  chunk.readers |= uint8_t(1u << reader);
  async_.reads[i * async_.num_readers + reader] = {epoch, site};
  if (reader == async_.store_reader()) async_.store_agents[i] = agent;
}

void SharedMemory::need_words(size_t chunk, Accessor who, const char* what, AsyncNeeds& needs) {
  const Word* before = nullptr;
  for (unsigned i = unsigned(4 * chunk); i < 4 * chunk + 4; i++) {
    const Word& word = words_[i];
    if (word.mbarrier) mbarrier_touched(i, who, what);
    if (word.in_flight || word.initialised != 15) read_failed(i, 15, who, what);
    if (before && before->writer == word.writer && before->write_epoch == word.write_epoch &&
        before->by_tma == word.by_tma && before->in_batch == word.in_batch)
      continue;
    before = &word;
    if (!ordered_by_lanes(word, who)) read_failed(i, 15, who, what);
    if (word.by_tma) {
      needs.add(async_.chunks[chunk].load, async_.loads[async_.chunks[chunk].load]);
      continue;
    }
    const uint32_t fence = word.in_batch ? 0 : async_.fence_after(word.writer, word.write_epoch);
    if (fence == 0)
      throw Diagnostic("proxy-fence-missing",
                       format("%s reads %s, written by %s, which executed no fence_proxy_async since", what,
                              word_name(i).c_str(), writer_name(word).c_str()));
    needs.add({word.writer, word.write_epoch, fence, kSmemBase + 4 * i});
  }
}

void SharedMemory::check_needs(const AsyncNeeds& needs, Accessor who, const char* what) const {
  for (const AsyncNeeds::Load& load : needs.loads)
    if (who.own->known[load.agent] < load.phase)
      throw Diagnostic("tma-load-not-waited",
                       format("%s reads what %s brings, whose mbarrier this thread has not waited for", what,
                              load_name(async_.loads[load.number]).c_str()));
  bool all = true;
  for (unsigned w = 0; w < num_warps_; w++)
    if (needs.warps >> w & 1) all &= who.known_of_warp(w) >= needs.of_warp[w];
  if (all) return;
  for (const AsyncNeeds::Writer& writer : needs.writers) {
    if (writer.tid == who.tid || who.knows(writer.tid, writer.fenced)) continue;
    const bool knows = who.knows(writer.tid, writer.written);
    throw Diagnostic(
        knows ? "proxy-fence-missing" : "shared-race-read-after-write",
        format("%s reads %s, written by thread %u (warp %u), %s", what, place(writer.address).c_str(), writer.tid,
               writer.tid / kWarpSize,
               knows ? "whose fence_proxy_async is not ordered before now by a barrier" : "with no barrier between"));
  }
}

void SharedMemory::touch_chunk(unsigned address, bool write, Accessor who, const char* what) {
  const size_t i = (address - kSmemBase) / kChunkBytes;
  AsyncShadow::Chunk& chunk = async_.chunks[i];
  if (chunk.state == AsyncShadow::State::kInFlight)
    throw Diagnostic(write ? "tma-load-overwrite" : "tma-load-not-waited",
                     format("%s at %s, where %s is in flight", what, place(address).c_str(),
                            load_name(async_.loads[chunk.load]).c_str()),
                     int(who.tid));
  if (chunk.state == AsyncShadow::State::kLanded) spread_load(i);
  if (!write) return;
  if (chunk.readers) {
    const int reader = async_.reading(i, who.own->known);
    if (reader >= 0)
      async_read_failed(i, unsigned(reader),
                        unsigned(reader) == async_.store_reader() ? "tma-store-overwrite" : "wgmma-operand-overwritten",
                        what);
  }
  chunk = {};
}

// The words of a chunk that TMA brought say so.
void SharedMemory::spread_load(size_t chunk) {
  const BulkLoad& load = async_.loads[async_.chunks[chunk].load];
  for (size_t i = 4 * chunk; i < 4 * chunk + 4; i++) {
    Word& word = words_[i];
    word = Word{};
    word.by_tma = true;
    word.writer = uint16_t(load.agent);
    word.write_epoch = load.phase;
    word.write_site = load.site;
    word.initialised = 15;
  }
  async_.chunks[chunk].state = AsyncShadow::State::kWords;
}

void SharedMemory::async_read_failed(size_t chunk, unsigned reader, const char* name, const char* what) const {
  const bool store = reader == async_.store_reader();
  throw Diagnostic(
      name, format("%s to %s, which the %s at %s may still read: this thread does not know that it has been waited for",
                   what, word_name(unsigned(4 * chunk)).c_str(),
                   store ? "tma_store" : format("wgmma of warpgroup %u", reader).c_str(),
                   site_name(async_.reads[chunk * async_.num_readers + reader].site).c_str()));
}

}  // namespace emulator
