// Semaphores: words of global memory through which blocks order themselves. What a release publishes, which waits have
// acquired it, and the OS threads that sleep because their block can go on only after a release of another one.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "diagnostic.h"
#include "thread_clock.h"

namespace emulator {

struct Release;

// The waits of a block's threads, in the order of Knowledge::waits. Only the block's OS thread changes them.
struct Waits {
  struct OfThread {
    unsigned tid;
    std::vector<const Release*> acquired;  // by each wait the newest release of its semaphore, and with it all before
  };
  std::vector<OfThread> threads;
};

// One release_add: what its thread knew then.
struct Release {
  unsigned block, tid;
  Site site;
  std::vector<uint32_t> clock;  // its warp's
  ThreadClock own;
  const Waits* waits;  // of its block
  unsigned value = 0;  // what it adds
  const Release* previous = nullptr;  // of the same semaphore
  unsigned latest_block = 0;  // the largest number of a block that has released the semaphore up to now

  Accessor accessor() const { return {tid, clock.data(), &own}; }
  // Was the access of that thread of the same block before it?
  bool covers(unsigned thread, uint32_t epoch) const {
    return thread == tid ? epoch <= accessor().epoch() : accessor().knows(thread, epoch);
  }
};

class Semaphores {
 public:
  enum class Wake { kChanged, kDeadlock, kStopped };

  explicit Semaphores(unsigned workers) : running_(workers) {}

  // Has a block of the launch waited or released? Each that does begins so.
  bool in_use() const { return in_use_; }
  Waits* begin_use() {
    std::lock_guard<std::mutex> lock(mutex_);
    in_use_ = true;
    return &waits_.emplace_back();
  }
  // Adds to the word, and publishes.
  void release(unsigned* address, unsigned value, Release release);
  // If the word holds the value, the thread acquires its releases, and `known` says so; `latest_block` becomes the
  // largest number of a block that has brought the word there, 0 for none.
  bool acquire(const unsigned* address, unsigned value, Waits& waits, unsigned tid, Knowledge& known,
               unsigned* latest_block);
  // Acquires the word's releases, and returns its value, whatever it is. With `late` the newest release has not
  // arrived.
  unsigned look(const unsigned* address, bool late, Waits& waits, unsigned tid, Knowledge& known);
  // Was the access of a thread of another block acquired by one who has these waits and knows of some of them?
  bool ordered(const Waits& waits, const Knowledge& known, unsigned block, unsigned tid, uint32_t epoch);
  // A release that such a one has acquired and that does not cover the access, because the warp of both has not
  // synchronised between the two; null if there is none.
  static const Release* left_out(const Waits& waits, const Knowledge& known, unsigned block, unsigned tid,
                                 uint32_t epoch);
  // A word that may be a semaphore has changed.
  void changed() {
    std::lock_guard<std::mutex> lock(mutex_);
    wake();
  }

  // An OS thread whose block waits sleeps until a word changes after the version that it has seen.
  uint64_t version() const { return version_; }
  Wake sleep(uint64_t seen);
  // An OS thread has no more blocks.
  void leave();
  // A block has failed: all that sleep give up.
  void stop();

 private:
  // The word's newest release, null if there is none. The mutex is locked, here and below.
  const Release* newest(const unsigned* address) const;
  // The thread acquires a release, null for none, and those of its semaphore before it.
  void acquire(const Release* release, Waits& waits, unsigned tid, Knowledge& known);
  void wake() {
    version_++;
    sleeping_ = 0;  // they look again
    woken_.notify_all();
  }

  std::atomic<bool> in_use_{false};
  std::atomic<uint64_t> version_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
  unsigned running_, sleeping_ = 0;
  bool deadlock_ = false, stopped_ = false;
  std::deque<Waits> waits_;  // of each block that has waited or released
  std::deque<Release> releases_;
  std::unordered_map<const unsigned*, const Release*> newest_;
};

}  // namespace emulator
