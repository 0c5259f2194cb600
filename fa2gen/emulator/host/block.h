// One thread block: a fiber for every CUDA thread, scheduled on one OS thread. A fiber runs until it waits: in a warp
// collective for the other 31 lanes, in a barrier for the other warps.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "bank_conflicts.h"
#include "context.h"
#include "counters.h"
#include "diagnostic.h"
#include "fiber.h"
#include "grid.h"
#include "mbarriers.h"
#include "runtime.h"
#include "shared_memory.h"
#include "stacks.h"
#include "warpgroups.h"

namespace emulator {

class Block {
 public:
  // The block that this OS thread is running.
  static __thread Block* running;

  const Options options;
  Grid& grid;
  GlobalMemory& global;
  SharedMemory shared;
  Counters counters;
  unsigned block_number = 0;
  size_t recent_buffer = 0;
  Fiber* current = nullptr;

  Block(unsigned num_threads, unsigned shared_bytes, Grid& blocks, const Options& how)
      : options(how),
        grid(blocks),
        global(blocks.memory),
        shared(shared_bytes, num_threads / kWarpSize, how.checks),
        num_threads_(num_threads),
        num_warps_(num_threads / kWarpSize),
        agents_(num_threads),
        mbarriers_(shared, how.checks),
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
    agents_.reset(), mbarriers_.reset();
    arrivals_.clear(), loads_.clear(), store_queues_.clear();
    warpgroups_.clear();
    if (registers_) registers_->reset();
    has_async_ = false;
    additions_.clear(), waiting_.clear();
    waits_ = nullptr, threads_ordered_ = false;
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
      f.clock = ThreadClock{}, f.batches = CopyBatches{};
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
    if (waits_)
      grid.additions.make_in_order(additions_);
    else
      grid.additions.hold(number, additions_, random_);
  }

  unsigned num_threads() const { return num_threads_; }
  unsigned warp_index() const { return current->tid / kWarpSize; }
  unsigned lane_index() const { return current->tid % kWarpSize; }
  Warp& warp() { return warps_[warp_index()]; }
  Lane& lane() { return warp().lanes[lane_index()]; }
  Accessor accessor() { return {current->tid, warp().clock, &current->clock}; }
  Accessor accessor(unsigned tid) { return {tid, warps_[tid / kWarpSize].clock, &fibers_[tid].clock}; }
  // Reads of an ldmatrix by this warp follow.
  void begin_collective() {
    if (!shared.orders_lanes()) return;
    LaneReads::Epochs epochs;
    const unsigned w = warp_index();
    for (unsigned l = 0; l < kWarpSize; l++) epochs[l] = accessor(w * kWarpSize + l).epoch();
    shared.begin_collective(w, epochs);
  }
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
      if (!warpgroups_.empty()) check_converged();
      if (complete(w)) {
        release(warp_index(), current);
        current->waits = Operation::kNone;
        return;
      }
    }
    switch_to(next());
  }

  // The lanes of a warp, all of which are here, synchronise: what one knows all know, and an epoch ends.
  void synchronise(unsigned warp) {
    if (threads_ordered_) {
      Fiber* lanes = &fibers_[warp * kWarpSize];
      Knowledge all;
      for (unsigned l = 0; l < kWarpSize; l++) all.join(lanes[l].clock.known);
      uint32_t ahead = 0;
      for (unsigned l = 0; l < kWarpSize; l++) {
        ahead = std::max(ahead, lanes[l].clock.ahead);
        lanes[l].clock.ahead = 0;
        lanes[l].clock.known = all;
      }
      warps_[warp].clock[warp] += ahead;
    }
    warps_[warp].clock[warp]++;
  }

  void barrier(Operation operation, int id, int threads) {
    if (id < 0 || id >= kNumBarriers)
      throw Diagnostic("barrier-id", format("barrier %d does not exist; there are 0 to 15", id));
    if (threads <= 0 || threads % int(kWarpSize) || threads > int(num_threads_))
      throw Diagnostic("barrier-count", format("barrier %d with %d threads; must be a multiple of 32, at most %u", id,
                                               threads, num_threads_));
    rendezvous(operation, id, threads, [&](Warp& w) { return arrive(w, operation, id, threads); });
  }

  // ---- mbarriers

  void mbarrier_init(unsigned address, int count) {
    mbarriers_.init(address, count, agents_.add(), accessor(), current->site);
    threads_ordered_ = true;
  }
  void mbarrier_arrive(unsigned address, const char* what = "mbarrier_arrive");
  void cp_async_mbarrier_arrive(unsigned address);
  void mbarrier_wait(unsigned address, unsigned parity);

  // ---- TMA (tma.cpp)

  void tma_load(unsigned dst, const void* map, unsigned mbarrier, const int (&at)[4]);
  void tma_store(const void* map, unsigned src, const int (&at)[4]);
  void tma_store_commit();
  void tma_store_wait_read(unsigned pending);
  void fence_proxy_async();
  void fence_mbarrier_init();
  void mbarrier_arrive_expect_tx(unsigned address, unsigned bytes);

  // ---- Warpgroups (warpgroups.cpp, registers.cpp)

  Warpgroup& warpgroup();
  void setmaxnreg(unsigned registers, bool increase);
  // The current fiber waits until another one wakes it.
  void sleep(Operation operation) {
    current->waits = operation;
    switch_to(next());
  }
  void wake(unsigned tid) {
    fibers_[tid].waits = Operation::kNone;
    ready_[num_ready_++] = tid;
  }
  void wake_warp(unsigned warp) { release(warp, nullptr); }

  // ---- Between blocks

  void open_tickets(unsigned long long* address);
  unsigned draw_ticket(unsigned long long* address, unsigned last);
  void add(float* address, float value, const char* what);
  void release_add(unsigned* address, unsigned value);
  void wait_until_equal(const unsigned* address, unsigned value);
  unsigned look(const unsigned* address);

  // Lands the copies of a thread up to the given batch, or those that cp_async_wait covers.
  template <class Covered>
  void land_copies(Fiber& f, Covered covered) {
    size_t landed = 0;
    for (; landed < f.copies.size() && covered(f.copies[landed]); landed++) {
      const AsyncCopy& copy = f.copies[landed];
      uint8_t* to = shared.at(copy.dst);
      std::memset(to, 0, 16);
      std::memcpy(to, copy.src, size_t(copy.valid_bytes));
      if (copy.batch)
        shared.land(copy.dst, copy.batch);
      else
        shared.land(copy.dst, accessor(f.tid));
    }
    f.copies.erase(f.copies.begin(), f.copies.begin() + long(landed));
  }

  // Where the current fiber, or thread `tid`, is: the head of every report.
  std::string where(unsigned tid) const {
    const Fiber& f = fibers_[tid];
    return format("block (%u,%u,%u) thread %u (warp %u lane %u) at %s%s", index_.x, index_.y, index_.z, tid,
                  tid / kWarpSize, tid % kWarpSize, site_name(f.site).c_str(), trace_text(f).c_str());
  }

 private:
  static constexpr int kNumBarriers = 16;

  static bool of_whole_block(Operation operation) {
    return operation == Operation::kSyncThreads || operation == Operation::kSyncThreadsOr;
  }

  bool arrive(Warp& w, Operation operation, int id, int threads);

  // ---- Scheduling

  static void fiber_main();
  void check_exit() const;
  Diagnostic located(const Diagnostic& d) const {
    if (d.tid == Diagnostic::kWholeBlock) return d;
    const unsigned tid = d.tid == Diagnostic::kCurrentThread ? current->tid : unsigned(d.tid);
    return Diagnostic(d.name, where(tid) + ": " + d.what());
  }

  [[noreturn]] void finish(std::unique_ptr<Diagnostic> failure);

  void arrive(Mbarrier& m, const Knowledge& known, const char* what, Site site, unsigned tid);
  void wake_waiters(Mbarrier& m);
  bool anything_in_flight() const { return !arrivals_.empty() || !loads_.empty(); }
  void land_one();
  void check_end() const;
  Diagnostic deadlock() const;

  struct InFlightLoad {
    BulkLoad load;
    uint32_t number = 0;  // in the shadow
  };
  struct BulkStore {
    Box box;
    unsigned group;
    Site site;
  };
  // The TMA stores of one thread that have not read.
  struct StoreQueue {
    unsigned tid;
    size_t agent;
    unsigned committed, waited;  // groups
    std::vector<BulkStore> stores;
  };
  void begin_async();
  void check_box(const Box& box, const char* what) const;
  void land_load(size_t i);
  StoreQueue& store_queue();
  void check_async_exit() const;
  void check_async_end() const;
  Diagnostic unwaited(const BulkLoad& load) const;
  void check_converged() const;

  bool is_ordered(const Adder& adder);
  Diagnostic unordered(const Adder& adder, const float* address, const char* what) const;
  void begin_semaphores();
  bool acquires(Fiber& fiber);
  void look_at_semaphores();
  void sleep_until_release();

  // The fiber to run next.
  Fiber* next() {
    if (options.random_schedule && random_ % 64 == 0 && anything_in_flight()) land_one();
    if (!waiting_.empty() && random_ % 16 == 0) look_at_semaphores();
    while (num_ready_ == 0) {
      if (anything_in_flight())
        land_one();
      else if (!waiting_.empty())
        sleep_until_release();
      else
        throw deadlock();
    }
    return pick();
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

  static std::string trace_text(const Fiber& f) {
    return f.trace_name ? format(" [%s %d]", f.trace_name, f.trace_value) : std::string();
  }

  const unsigned num_threads_, num_warps_;
  Agents agents_;
  Mbarriers mbarriers_;
  std::vector<AsyncArrival> arrivals_;  // that have not happened
  std::vector<InFlightLoad> loads_;     // that have not landed
  std::vector<StoreQueue> store_queues_;
  std::vector<std::unique_ptr<Warpgroup>> warpgroups_;  // empty until one of them uses wgmma
  std::unique_ptr<RegisterBudget> registers_;
  bool has_async_ = false;
  std::vector<Addition> additions_;     // not made
  std::vector<unsigned> waiting_;       // threads, for semaphores
  Waits* waits_ = nullptr;              // once the block uses semaphores
  bool threads_ordered_ = false;        // it has an mbarrier or uses semaphores, which order single threads
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
