// What a block does at its barriers and mbarriers, how its threads begin and end, and what it says when none can run.
#include "block.h"

namespace emulator {

// The whole warp has reached a barrier.
bool Block::arrive(Warp& w, Operation operation, int id, int threads) {
  counters.barriers++;
  const unsigned me = warp_index();
  Barrier& b = barriers_[id];
  if (b.arrived == 0) {
    b.expected = threads, b.operation = operation, b.site = w.site;
  } else {
    if (b.expected != threads)
      throw Diagnostic("barrier-count", format("barrier %d with %d threads, but with %d at %s", id, threads, b.expected,
                                               site_name(b.site).c_str()));
    // A block-wide barrier that pairs two places in the text means that a warp skipped one of them.
    if ((of_whole_block(operation) || of_whole_block(b.operation)) && b.site != w.site)
      throw Diagnostic("barrier-site",
                       format("%s meets other warps' %s at %s: a warp skipped a barrier", operation_name(operation),
                              operation_name(b.operation), site_name(b.site).c_str()));
  }
  b.arrived += kWarpSize;
  if (b.arrived > b.expected)
    throw Diagnostic("barrier-count", format("barrier %d: more than %d threads arrived", id, b.expected));
  synchronise(me);
  for (unsigned u = 0; u < num_warps_; u++) b.joined[u] = std::max(b.joined[u], u == me ? w.clock[u] - 1 : w.clock[u]);
  if (threads_ordered_) b.known.join(fibers_[me * kWarpSize].clock.known);
  if (operation == Operation::kSyncThreadsOr || operation == Operation::kBarSyncOr)
    for (const Lane& lane : w.lanes) b.any |= lane.a[0] != 0;
  const bool waits = operation != Operation::kBarArrive;
  if (waits) b.waiting |= 1u << me;
  if (b.arrived < b.expected) return !waits;
  for (unsigned u = 0; u < num_warps_; u++) {
    if (!(b.waiting >> u & 1)) continue;
    for (unsigned v = 0; v < num_warps_; v++)
      if (v != u) warps_[u].clock[v] = std::max(warps_[u].clock[v], b.joined[v]);
    if (threads_ordered_)
      for (unsigned l = 0; l < kWarpSize; l++) fibers_[u * kWarpSize + l].clock.known.join(b.known);
    warps_[u].any = b.any;
    if (u != me) release(u, nullptr);
  }
  b = Barrier{};
  return true;
}

// The entry of every fiber. Exceptions are caught in the fiber that threw, and the handler is left before switching:
// unwinding must not cross a stack switch.
void Block::fiber_main() {
  Block& block = *running;
  std::unique_ptr<Diagnostic> failure;
  try {
    emulator_call_kernel(block.params_);
    block.check_exit();
  } catch (const Diagnostic& d) {
    failure = std::make_unique<Diagnostic>(block.located(d));
  } catch (const std::exception& e) {
    failure = std::make_unique<Diagnostic>("out-of-memory", e.what());
  }
  block.finish(std::move(failure));
}

void Block::check_exit() const {
  if (options.checks) check_async_exit();
  if (!options.checks || current->copies.empty() || current->copies.back().batch) return;
  const AsyncCopy& first = *std::find_if(current->copies.begin(), current->copies.end(),
                                         [](const AsyncCopy& copy) { return copy.batch == 0; });
  throw Diagnostic(
      "cp-async-left-at-exit",
      format("the thread ends with %zu cp.async not waited for, the first issued at %s%s", current->copies.size(),
             site_name(first.site).c_str(), first.group == current->groups_committed ? " and never committed" : ""));
}

void Block::finish(std::unique_ptr<Diagnostic> failure) {
  current->done = true;
  alive_--;
  failure_ = std::move(failure);
  Fiber* following = nullptr;
  if (!failure_) {
    try {
      if (alive_ > 0)
        following = next();
      else
        check_end();
    } catch (const Diagnostic& d) {
      failure_ = std::make_unique<Diagnostic>(located(d));
    }
  }
  if (!following) Context::switch_from_to(current->context, main_);
  switch_to(following);
  __builtin_unreachable();
}

void Block::mbarrier_arrive(unsigned address, const char* what) {
  Mbarrier& m = mbarriers_[mbarriers_.find(address, accessor(), what)];
  const uint32_t phase = m.phase;
  if (options.checks) accessor().publish(m.joining, num_threads_);
  current->clock.ahead++;
  arrive(m, current->clock.known, what, current->site, current->tid);
  // The only thread that arrives knows that it has completed the phase, if nothing but its arrival was waited for.
  if (m.count == 1 && m.phase > phase && !m.had_bytes) current->clock.known.raise(m.agent, m.phase);
}

// The arrival comes when the copies land, which is when no thread can run without it; with a random schedule,
// sometimes earlier.
void Block::cp_async_mbarrier_arrive(unsigned address) {
  const unsigned mbarrier = mbarriers_.find(address, accessor(), "cp_async_mbarrier_arrive");
  CopyBatches& batches = current->batches;
  // A batch for each group that the copies belong to, so that cp_async_wait can cover some of them.
  const AsyncCopy* previous = nullptr;
  for (AsyncCopy& copy : current->copies) {
    if (copy.batch) continue;
    if (!previous || previous->group != copy.group) batches.begin(copy.group);
    copy.batch = batches.count;
    previous = &copy;
  }
  AsyncArrival arrival{current->tid, mbarrier, batches.count, {}, current->site};
  arrival.known.join_epochs(current->clock.known, 2 * size_t(num_threads_));
  arrivals_.push_back(std::move(arrival));
}

void Block::mbarrier_wait(unsigned address, unsigned parity) {
  const unsigned mbarrier = mbarriers_.find(address, accessor(), "mbarrier_wait");
  if (parity > 1) throw Diagnostic("mbarrier-parity", format("the parity is %u; phases have parity 0 or 1", parity));
  Mbarrier& m = mbarriers_[mbarrier];
  if (m.phase % 2 != parity) {
    current->clock.known.join(m.joined);
    return;
  }
  m.waiters.push_back(current->tid);
  current->waits = Operation::kMbarrierWait;
  current->mbarrier = mbarrier, current->parity = parity;
  switch_to(next());
}

// An arrival on an mbarrier. Completing the phase wakes all that wait: they wait for this phase.
void Block::arrive(Mbarrier& m, const Knowledge& known, const char* what, Site site, unsigned tid) {
  if (mbarriers_.arrive(m, known, what, site, tid)) wake_waiters(m);
}

void Block::wake_waiters(Mbarrier& m) {
  for (unsigned waiter : m.waiters) {
    Fiber& f = fibers_[waiter];
    f.clock.known.join(m.joined);
    f.waits = Operation::kNone;
    ready_[num_ready_++] = waiter;
  }
  m.waiters.clear();
}

// One asynchronous arrival happens, its thread's copies having landed, or a copy by TMA lands.
void Block::land_one() {
  const size_t i = options.random_schedule ? random_ / 64 % (arrivals_.size() + loads_.size()) : 0;
  if (i >= arrivals_.size()) return land_load(i - arrivals_.size());
  const AsyncArrival arrival = std::move(arrivals_[i]);
  arrivals_.erase(arrivals_.begin() + long(i));
  land_copies(fibers_[arrival.tid], [&](const AsyncCopy& c) { return c.batch && c.batch <= arrival.batch; });
  Mbarrier& m = mbarriers_[arrival.mbarrier];
  m.joining.join(arrival.known);
  m.joining.raise(num_threads_ + arrival.tid, arrival.batch);
  arrive(m, arrival.known, "cp_async_mbarrier_arrive", arrival.site, arrival.tid);
}

// The last thread has ended: what is still in flight is copies that nobody has waited for.
void Block::check_end() const {
  if (!options.checks) return;
  check_async_end();
  for (const AsyncArrival& arrival : arrivals_) {
    const auto& copies = fibers_[arrival.tid].copies;
    if (copies.empty() || copies.front().batch > arrival.batch) continue;
    throw Diagnostic(
        "cp-async-left-at-exit",
        format("the block ends before the copies that arrive on %s have landed: nobody waits for them; the "
               "first was issued at %s",
               shared.place(mbarriers_.all()[arrival.mbarrier].address).c_str(),
               site_name(copies.front().site).c_str()),
        int(arrival.tid));
  }
}

// No fiber can run: says who waits for what.
Diagnostic Block::deadlock() const {
  std::string text = format("block (%u,%u,%u): no thread can run", index_.x, index_.y, index_.z);
  for (int id = 0; id < kNumBarriers; id++)
    if (barriers_[id].arrived)
      text += format("\n  barrier %d: %d of %d threads arrived, first at %s", id, barriers_[id].arrived,
                     barriers_[id].expected, site_name(barriers_[id].site).c_str());
  for (const Mbarrier& m : mbarriers_.all())
    if (!m.waiters.empty()) text += "\n  " + mbarriers_.state(m);
  if (registers_) text += registers_->state();
  for (unsigned w = 0; w < num_warps_; w++) {
    for (unsigned first = 0; first < kWarpSize;) {  // runs of lanes in the same state
      const Fiber& f = fibers_[w * kWarpSize + first];
      unsigned end = first + 1;
      for (; end < kWarpSize; end++) {
        const Fiber& other = fibers_[w * kWarpSize + end];
        if (other.done != f.done) break;
        if (!f.done && (other.site != f.site || other.waits != f.waits)) break;
        if (f.waits == Operation::kMbarrierWait && (other.mbarrier != f.mbarrier || other.parity != f.parity)) break;
        if (f.waits == Operation::kDrawTicket && other.tickets != f.tickets) break;
        if (f.waits == Operation::kWaitUntilEqual && (other.semaphore != f.semaphore || other.wanted != f.wanted))
          break;
      }
      text += format("\n  warp %u lanes %u-%u: ", w, first, end - 1);
      text += f.done
                  ? "ended"
                  : format("in %s at %s%s", operation_name(f.waits), site_name(f.site).c_str(), trace_text(f).c_str());
      if (!f.done && f.waits == Operation::kMbarrierWait)
        text += format(" for parity %u of %s", f.parity, shared.place(mbarriers_.all()[f.mbarrier].address).c_str());
      if (!f.done && f.waits == Operation::kWaitUntilEqual)
        text += format(" for %s to be %u; it is %u", global.element(f.semaphore).c_str(), f.wanted,
                       __atomic_load_n(f.semaphore, __ATOMIC_RELAXED));
      if (!f.done && f.waits == Operation::kWgmmaWait)
        text += warpgroups_[f.tid / kWarpgroupSize]->waits_for(f.tid % kWarpgroupSize);
      if (!f.done && f.waits == Operation::kDrawTicket)
        text += format(" from %s, which no block has opened", global.element(f.tickets).c_str());
      first = end;
    }
  }
  if (!waiting_.empty()) text += "\n  no other block that has started can run either; the ones before have ended";
  bool lacks_copies = false;
  for (const Mbarrier& m : mbarriers_.all()) lacks_copies |= !m.waiters.empty() && Mbarriers::lacks_copies(m);
  return Diagnostic(lacks_copies ? "mbarrier-tx-count" : "deadlock", text, Diagnostic::kWholeBlock);
}

}  // namespace emulator
