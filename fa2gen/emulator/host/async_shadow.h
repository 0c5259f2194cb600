// What the asynchronous proxy (TMA and wgmma) does to shared memory, by chunks of 16 bytes: which copy brought a chunk,
// and which products and stores have read it. Once a thread has touched a chunk that TMA brought, its words know so too
// (shared_memory.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "diagnostic.h"
#include "tensor_map.h"
#include "thread_clock.h"

namespace emulator {

constexpr unsigned kWarpgroupSize = 128, kChunkBytes = 16;

// A tma_load, from its issue on.
struct BulkLoad {
  Box box;
  unsigned tid;
  Site site;
  unsigned mbarrier;
  size_t agent;  // the mbarrier's
  uint32_t phase;  // who knows so many of its phases knows that the copy has landed
};

// What must have happened before an asynchronous read, for each thread that takes part in it.
struct AsyncNeeds {
  struct Load {
    uint32_t number;
    size_t agent;
    uint32_t phase;
  };
  struct Writer {
    unsigned tid;
    uint32_t written, fenced;  // epochs of its newest write, and of its first fence_proxy_async after that
    unsigned address;
  };
  std::vector<Load> loads;
  std::vector<Writer> writers;
  uint32_t of_warp[kMaxWarps] = {};  // the newest `fenced` of each warp
  uint64_t warps = 0;  // which of these there are

  void clear() {
    loads.clear(), writers.clear();
    std::fill(of_warp, of_warp + kMaxWarps, 0u);
    warps = 0;
  }
  void add(uint32_t number, const BulkLoad& load) {
    for (auto known = loads.rbegin(); known != loads.rend(); ++known)
      if (known->agent == load.agent) {
        if (load.phase > known->phase) *known = {number, load.agent, load.phase};
        return;
      }
    loads.push_back({number, load.agent, load.phase});
  }
  void add(const Writer& writer) {
    const unsigned w = writer.tid / kWarpSize;
    warps |= 1ull << w;
    of_warp[w] = std::max(of_warp[w], writer.fenced);
    for (auto known = writers.rbegin(); known != writers.rend(); ++known)
      if (known->tid == writer.tid) {
        if (writer.fenced > known->fenced) *known = writer;
        return;
      }
    writers.push_back(writer);
  }
};

struct AsyncShadow {
  enum class State : uint8_t { kWords, kInFlight, kLanded };
  struct Chunk {
    uint32_t load = 0;  // the number of the TMA load whose bytes it holds, or will; 0 for none
    State state = State::kWords;  // kWords: the shadow of its words says all
    uint8_t readers = 0;  // a bit for each of the readers below that has read
  };
  struct Read {
    uint32_t epoch = 0;
    Site site{0};
  };
  // A reader is a warpgroup, or the last one, which stands for all that store by TMA.
  unsigned num_readers = 0;
  std::vector<Chunk> chunks;
  std::vector<Read> reads;  // [chunk][reader]
  std::vector<size_t> agents;  // [reader]; of stores, see below
  std::vector<size_t> store_agents;  // [chunk]: whose store has read last
  std::vector<BulkLoad> loads;  // by number
  std::vector<std::vector<uint32_t>> fences;  // [thread]: epochs that ended with a fence_proxy_async

  void start(size_t num_chunks, unsigned num_threads) {
    num_readers = (num_threads + kWarpgroupSize - 1) / kWarpgroupSize + 1;
    chunks.assign(num_chunks, Chunk{});
    reads.assign(num_chunks * num_readers, Read{});
    agents.assign(num_readers, 0);
    store_agents.assign(num_chunks, 0);
    loads.assign(1, BulkLoad{});
    fences.assign(num_threads, {});
  }
  unsigned store_reader() const { return num_readers - 1; }

  // The first fence of a thread that came after what it did in that epoch; 0 for none.
  uint32_t fence_after(unsigned tid, uint32_t epoch) const {
    const auto& all = fences[tid];
    if (all.empty() || all.back() < epoch) return 0;
    return *std::lower_bound(all.begin(), all.end(), epoch);
  }
  // A reader that has not read to the end as far as the thread knows, or -1.
  int reading(size_t chunk, const Knowledge& known) const {
    for (unsigned r = 0; r < num_readers; r++) {
      if (!(chunks[chunk].readers >> r & 1)) continue;
      const size_t agent = r == store_reader() ? store_agents[chunk] : agents[r];
      if (known[agent] < reads[chunk * num_readers + r].epoch) return int(r);
    }
    return -1;
  }
};

}  // namespace emulator
