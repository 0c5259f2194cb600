// What semaphores order, and the sleep of OS threads whose blocks wait.
#include "semaphores.h"

#include <unordered_set>
#include <utility>

namespace emulator {

void Semaphores::release(unsigned* address, unsigned value, Release release) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Release*& last = newest_[address];
  release.value = value;
  release.previous = last;
  release.latest_block = last ? std::max(last->latest_block, release.block) : release.block;
  last = &releases_.emplace_back(std::move(release));
  __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  wake();
}

bool Semaphores::acquire(const unsigned* address, unsigned value, Waits& waits, unsigned tid, Knowledge& known,
                         unsigned* latest_block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (__atomic_load_n(address, __ATOMIC_RELAXED) != value) return false;
  const Release* release = newest(address);
  *latest_block = release ? release->latest_block : 0;
  acquire(release, waits, tid, known);
  return true;
}

unsigned Semaphores::look(const unsigned* address, bool late, Waits& waits, unsigned tid, Knowledge& known) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Release* release = newest(address);
  unsigned value = __atomic_load_n(address, __ATOMIC_RELAXED);
  if (late && release) {
    value -= release->value;
    release = release->previous;
  }
  acquire(release, waits, tid, known);
  return value;
}

const Release* Semaphores::newest(const unsigned* address) const {
  const auto found = newest_.find(address);
  return found == newest_.end() ? nullptr : found->second;
}

void Semaphores::acquire(const Release* release, Waits& waits, unsigned tid, Knowledge& known) {
  if (!release) return;
  size_t place = 0;
  while (place < waits.threads.size() && waits.threads[place].tid != tid) place++;
  if (place == waits.threads.size()) waits.threads.push_back({tid, {}});
  auto& acquired = waits.threads[place].acquired;
  acquired.push_back(release);
  known.raise_waits(place, uint32_t(acquired.size()));
}

bool Semaphores::ordered(const Waits& waits, const Knowledge& known, unsigned block, unsigned tid, uint32_t epoch) {
  auto is_it = [&](const Release& release) { return release.block == block && release.covers(tid, epoch); };
  // Nearly always it is one of the newest releases that a thread of this block has acquired: a lane that speaks for its
  // block looks a tile ahead.
  for (size_t i = 0; i < waits.threads.size(); i++) {
    const uint32_t count = known.waits(i);
    for (uint32_t k = count; k > 0 && k + 3 > count; k--)
      if (is_it(*waits.threads[i].acquired[k - 1])) return true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::unordered_set<const Release*> seen;
  std::vector<const Release*> open;
  auto add = [&](const Waits& acquirer, const Knowledge& knows) {
    for (size_t i = 0; i < acquirer.threads.size(); i++)
      for (uint32_t k = 0; k < knows.waits(i); k++)
        for (const Release* r = acquirer.threads[i].acquired[k]; r && seen.insert(r).second; r = r->previous)
          open.push_back(r);
  };
  add(waits, known);
  while (!open.empty()) {
    const Release* release = open.back();
    open.pop_back();
    if (is_it(*release)) return true;
    add(*release->waits, release->own.known);
  }
  return false;
}

const Release* Semaphores::left_out(const Waits& waits, const Knowledge& known, unsigned block, unsigned tid,
                                    uint32_t epoch) {
  for (size_t i = 0; i < waits.threads.size(); i++)
    for (uint32_t k = 0; k < known.waits(i); k++) {
      const Release* r = waits.threads[i].acquired[k];
      if (r->block == block && r->tid / kWarpSize == tid / kWarpSize && epoch <= r->accessor().epoch()) return r;
    }
  return nullptr;
}

// All that run sleep, having seen the newest version: nothing will change any more.
Semaphores::Wake Semaphores::sleep(uint64_t seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (version_ == seen && ++sleeping_ == running_) {
    deadlock_ = true;
    woken_.notify_all();
  }
  woken_.wait(lock, [&] { return version_ != seen || deadlock_ || stopped_; });
  return deadlock_ ? Wake::kDeadlock : stopped_ ? Wake::kStopped : Wake::kChanged;
}

void Semaphores::leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  running_--;
  if (running_ && sleeping_ == running_) {
    deadlock_ = true;
    woken_.notify_all();
  }
}

void Semaphores::stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  woken_.notify_all();
}

}  // namespace emulator
