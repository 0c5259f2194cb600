// One thread block: a fiber for every CUDA thread, scheduled on one OS thread. A fiber runs until it waits: in a warp
// collective for the other 31 lanes, in a barrier for the other warps.
#pragma once
#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "bank_conflicts.h"
#include "context.h"
#include "counters.h"
#include "diagnostic.h"
#include "global_memory.h"
#include "numerics.h"
#include "runtime.h"
#include "shared_memory.h"
#include "stacks.h"

namespace emulator {

struct Options {
  uint64_t seed = 1;
  bool random_schedule = true;  // any ready fiber next; otherwise mostly the one made ready last, which is faster
  bool checks = true;           // the shadow of shared memory; cp.async lands late and memory is poisoned either way
};

enum class Operation : uint8_t {
  kNone,
  kShflXor,
  kAnyLane,
  kAllLanes,
  kLdmatrix,
  kLdmatrixTrans,
  kMmaBf16,
  kMmaFp16,
  kSyncWarp,
  kSyncThreads,
  kBarSync,
  kBarArrive
};
inline const char* operation_name(Operation operation) {
  static const char* const names[] = {"nothing",     "shfl_xor",          "any_lane",           "all_lanes",
                                      "ldmatrix_x4", "ldmatrix_x4_trans", "mma_m16n8k16<bf16>", "mma_m16n8k16<fp16>",
                                      "sync_warp",   "sync_threads",      "bar_sync",           "bar_arrive"};
  return names[int(operation)];
}

struct AsyncCopy {
  unsigned dst;
  int valid_bytes;
  unsigned group;
  const void* src;
  Site site;
};

struct Fiber {
  Context context;
  unsigned tid = 0;
  bool done = false;
  Operation waits = Operation::kNone;  // the collective that it is blocked in
  Site site{0};                        // the primitive that it executed last
  const char* trace_name = nullptr;
  int trace_value = 0;
  unsigned groups_committed = 0;
  std::vector<AsyncCopy> copies;  // in issue order, not landed
};

struct Warp {
  Operation operation = Operation::kNone;
  Site site{0};
  unsigned arrived = 0;
  int barrier_id = -1, barrier_threads = 0;
  Lane lanes[kWarpSize];
  uint32_t clock[kMaxWarps] = {};  // see shared_memory.h
};

struct Barrier {
  int expected = 0, arrived = 0;
  Operation operation = Operation::kNone;
  Site site{0};
  uint32_t waiting = 0;             // a bit for each warp
  uint32_t joined[kMaxWarps] = {};  // the newest epoch of each warp that has arrived, directly or through another
};

class Block {
 public:
  // The block that this OS thread is running.
  static __thread Block* running;

  const Options options;
  GlobalMemory& global;
  SharedMemory shared;
  Counters counters;
  unsigned block_number = 0;
  size_t recent_buffer = 0;
  Fiber* current = nullptr;

  Block(unsigned num_threads, unsigned shared_bytes, GlobalMemory& memory, const Options& how)
      : options(how),
        global(memory),
        shared(shared_bytes, num_threads / kWarpSize, how.checks),
        num_threads_(num_threads),
        num_warps_(num_threads / kWarpSize),
        fibers_(num_threads),
        warps_(num_warps_),
        conflicts_(num_warps_),
        ready_(num_threads),
        stacks_(int(num_threads)) {}

  // Runs one block to its end, or throws its first diagnostic.
  void run(Dim3 index, unsigned number, const void* params) {
    index_ = index, block_number = number, params_ = params;
    random_ = (options.seed * 0x9e3779b97f4a7c15ull) ^ (number * 0xbf58476d1ce4e5b9ull) ^ 0x94d049bb133111ebull;
    shared.reset();
    std::fill(barriers_, barriers_ + kNumBarriers, Barrier{});
    failure_.reset();
    num_ready_ = 0, alive_ = num_threads_;
    for (unsigned w = 0; w < num_warps_; w++) {
      warps_[w] = Warp{};
      warps_[w].clock[w] = 1;
    }
    for (unsigned t = 0; t < num_threads_; t++) {
      Fiber& f = fibers_[t];
      f.tid = t, f.done = false, f.waits = Operation::kNone, f.site = Site{0};
      f.trace_name = nullptr, f.groups_committed = 0;
      f.copies.clear();
      stacks_.poison(int(t));
      f.context.prepare(stacks_.stack(int(t)), StackPool::kBytes, fiber_main);
      ready_[num_ready_++] = t;
    }
    running = this;
    current_block_index = index;
    current = pick();
    current_tid = current->tid;
    Context::switch_from_to(main_, current->context);
    running = nullptr;
    for (BankConflicts& c : conflicts_) c.flush();
    if (failure_) throw *failure_;
  }

  unsigned num_threads() const { return num_threads_; }
  unsigned warp_index() const { return current->tid / kWarpSize; }
  unsigned lane_index() const { return current->tid % kWarpSize; }
  Warp& warp() { return warps_[warp_index()]; }
  Lane& lane() { return warp().lanes[lane_index()]; }
  Accessor accessor() { return {current->tid, warp().clock}; }
  BankConflicts& conflicts() { return conflicts_[warp_index()]; }
  const StackPool& stacks() const { return stacks_; }

  // All 32 lanes meet here. `complete` runs once, in the last to arrive, and says whether the warp may go on.
  template <class Complete>
  void rendezvous(Operation operation, int barrier_id, int barrier_threads, Complete complete) {
    Warp& w = warp();
    const Site site = current->site;
    if (w.arrived == 0) {
      w.operation = operation, w.site = site, w.barrier_id = barrier_id, w.barrier_threads = barrier_threads;
    } else if (w.operation != operation || w.site != site || w.barrier_id != barrier_id ||
               w.barrier_threads != barrier_threads) {
      throw Diagnostic("warp-divergence",
                       format("%s, while %u lanes of this warp are in %s at %s", operation_name(operation), w.arrived,
                              operation_name(w.operation), site_name(w.site).c_str()));
    }
    current->waits = operation;
    if (++w.arrived == kWarpSize) {
      w.arrived = 0;
      conflicts().flush();
      if (complete(w)) {
        release(warp_index(), current);
        current->waits = Operation::kNone;
        return;
      }
    }
    if (num_ready_ == 0) throw deadlock();
    switch_to(pick());
  }

  void barrier(Operation operation, int id, int threads) {
    if (id < 0 || id >= kNumBarriers)
      throw Diagnostic("barrier-id", format("barrier %d does not exist; there are 0 to 15", id));
    if (threads <= 0 || threads % int(kWarpSize) || threads > int(num_threads_))
      throw Diagnostic("barrier-count", format("barrier %d with %d threads; must be a multiple of 32, at most %u", id,
                                               threads, num_threads_));
    rendezvous(operation, id, threads, [&](Warp& w) { return arrive(w, operation, id, threads); });
  }

  // Where the current fiber, or thread `tid`, is: the head of every report.
  std::string where(unsigned tid) const {
    const Fiber& f = fibers_[tid];
    return format("block (%u,%u,%u) thread %u (warp %u lane %u) at %s%s", index_.x, index_.y, index_.z, tid,
                  tid / kWarpSize, tid % kWarpSize, site_name(f.site).c_str(), trace_text(f).c_str());
  }

 private:
  static constexpr int kNumBarriers = 16;

  // The whole warp has reached a barrier.
  bool arrive(Warp& w, Operation operation, int id, int threads) {
    counters.barriers++;
    const unsigned me = warp_index();
    Barrier& b = barriers_[id];
    if (b.arrived == 0) {
      b.expected = threads, b.operation = operation, b.site = w.site;
    } else {
      if (b.expected != threads)
        throw Diagnostic("barrier-count", format("barrier %d with %d threads, but with %d at %s", id, threads,
                                                 b.expected, site_name(b.site).c_str()));
      // A block-wide barrier that pairs two places in the text means that a warp skipped one of them.
      if ((operation == Operation::kSyncThreads || b.operation == Operation::kSyncThreads) && b.site != w.site)
        throw Diagnostic("barrier-site",
                         format("%s meets other warps' %s at %s: a warp skipped a barrier", operation_name(operation),
                                operation_name(b.operation), site_name(b.site).c_str()));
    }
    b.arrived += kWarpSize;
    if (b.arrived > b.expected)
      throw Diagnostic("barrier-count", format("barrier %d: more than %d threads arrived", id, b.expected));
    for (unsigned u = 0; u < num_warps_; u++) b.joined[u] = std::max(b.joined[u], w.clock[u]);
    w.clock[me]++;
    const bool waits = operation != Operation::kBarArrive;
    if (waits) b.waiting |= 1u << me;
    if (b.arrived < b.expected) return !waits;
    for (unsigned u = 0; u < num_warps_; u++) {
      if (!(b.waiting >> u & 1)) continue;
      for (unsigned v = 0; v < num_warps_; v++)
        if (v != u) warps_[u].clock[v] = std::max(warps_[u].clock[v], b.joined[v]);
      if (u != me) release(u, nullptr);
    }
    b = Barrier{};
    return true;
  }

  // ---- Scheduling

  // The entry of every fiber. Exceptions are caught in the fiber that threw, and the handler is left before switching:
  // unwinding must not cross a stack switch.
  static void fiber_main() {
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

  void check_exit() const {
    if (!options.checks || current->copies.empty()) return;
    const AsyncCopy& first = current->copies[0];
    throw Diagnostic(
        "cp-async-left-at-exit",
        format("the thread ends with %zu cp.async not waited for, the first issued at %s%s", current->copies.size(),
               site_name(first.site).c_str(), first.group == current->groups_committed ? " and never committed" : ""));
  }

  Diagnostic located(const Diagnostic& d) const {
    if (d.tid == Diagnostic::kWholeBlock) return d;
    const unsigned tid = d.tid == Diagnostic::kCurrentThread ? current->tid : unsigned(d.tid);
    return Diagnostic(d.name, where(tid) + ": " + d.what());
  }

  [[noreturn]] void finish(std::unique_ptr<Diagnostic> failure) {
    current->done = true;
    alive_--;
    failure_ = std::move(failure);
    if (!failure_ && alive_ > 0 && num_ready_ == 0) failure_ = std::make_unique<Diagnostic>(deadlock());
    if (failure_ || alive_ == 0) Context::switch_from_to(current->context, main_);
    switch_to(pick());
    __builtin_unreachable();
  }

  Fiber* pick() {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    const bool jump = options.random_schedule || random_ % 32 == 0;
    const unsigned i = jump ? unsigned((random_ >> 32) * num_ready_ >> 32) : num_ready_ - 1;
    const unsigned tid = ready_[i];
    ready_[i] = ready_[--num_ready_];
    return &fibers_[tid];
  }

  void switch_to(Fiber* next) {
    if (next == current) return;
    counters.switches++;
    Fiber* from = current;
    current = next;
    current_tid = next->tid;
    Context::switch_from_to(from->context, next->context);
  }

  void release(unsigned warp, const Fiber* except) {
    for (unsigned l = 0; l < kWarpSize; l++) {
      Fiber& f = fibers_[warp * kWarpSize + l];
      if (&f == except) continue;
      f.waits = Operation::kNone;
      ready_[num_ready_++] = f.tid;
    }
  }

  // No fiber can run: says who waits for what.
  Diagnostic deadlock() const {
    std::string text = format("block (%u,%u,%u): no thread can run", index_.x, index_.y, index_.z);
    for (int id = 0; id < kNumBarriers; id++)
      if (barriers_[id].arrived)
        text += format("\n  barrier %d: %d of %d threads arrived, first at %s", id, barriers_[id].arrived,
                       barriers_[id].expected, site_name(barriers_[id].site).c_str());
    for (unsigned w = 0; w < num_warps_; w++) {
      for (unsigned first = 0; first < kWarpSize;) {  // runs of lanes in the same state
        const Fiber& f = fibers_[w * kWarpSize + first];
        unsigned end = first + 1;
        for (; end < kWarpSize; end++) {
          const Fiber& other = fibers_[w * kWarpSize + end];
          if (other.done != f.done || (!f.done && (other.site != f.site || other.waits != f.waits))) break;
        }
        text += format("\n  warp %u lanes %u-%u: ", w, first, end - 1);
        text +=
            f.done ? "ended"
                   : format("in %s at %s%s", operation_name(f.waits), site_name(f.site).c_str(), trace_text(f).c_str());
        first = end;
      }
    }
    return Diagnostic("deadlock", text, Diagnostic::kWholeBlock);
  }

  static std::string trace_text(const Fiber& f) {
    return f.trace_name ? format(" [%s %d]", f.trace_name, f.trace_value) : std::string();
  }

  const unsigned num_threads_, num_warps_;
  const void* params_ = nullptr;
  Dim3 index_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<BankConflicts> conflicts_;
  Barrier barriers_[kNumBarriers];
  std::vector<unsigned> ready_;
  unsigned num_ready_ = 0, alive_ = 0;
  uint64_t random_ = 1;
  StackPool stacks_;
  Context main_;
  std::unique_ptr<Diagnostic> failure_;
};

}  // namespace emulator
