// What semaphores order, and the sleep of OS threads whose blocks wait.
#include "semaphores.h"

#include <unordered_set>
#include <utility>

namespace emulator {

void Semaphores::release(unsigned* address, unsigned value, Release release) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Release*& newest = newest_[address];
  release.previous = newest;
  release.latest_block = newest ? std::max(newest->latest_block, release.block) : release.block;
  newest = &releases_.emplace_back(std::move(release));
  __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  wake();
}

bool Semaphores::acquire(const unsigned* address, unsigned value, Waits& waits, unsigned tid, Knowledge& known,
                         unsigned* latest_block) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (__atomic_load_n(address, __ATOMIC_RELAXED) != value) return false;
  const auto found = newest_.find(address);
  *latest_block = found == newest_.end() ? 0 : found->second->latest_block;
  if (found == newest_.end()) return true;
  size_t place = 0;
  while (place < waits.threads.size() && waits.threads[place].tid != tid) place++;
  if (place == waits.threads.size()) waits.threads.push_back({tid, {}});
  auto& acquired = waits.threads[place].acquired;
  acquired.push_back(found->second);
  known.raise_waits(place, uint32_t(acquired.size()));
  return true;
}

bool Semaphores::ordered(const Waits& waits, const Knowledge& known, unsigned block, unsigned tid, uint32_t epoch) {
  auto is_it = [&](const Release& release) { return release.block == block && release.covers(tid, epoch); };
  // Nearly always it is the newest release that a thread of this block has acquired.
  for (size_t i = 0; i < waits.threads.size(); i++) {
    const uint32_t count = known.waits(i);
    if (count && is_it(*waits.threads[i].acquired[count - 1])) return true;
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
