// The state of a block's threads, warps and barriers.
#pragma once
#include <cstdint>
#include <vector>

#include "context.h"
#include "diagnostic.h"
#include "numerics.h"
#include "thread_clock.h"

namespace emulator {

struct Options {
  uint64_t seed = 1;
  bool random_schedule = true;  // any ready fiber next; otherwise mostly the one made ready last, which is faster
  bool lazy_wgmma = false;      // wgmma reads its operands when it is waited for; otherwise as it is issued
  bool checks = true;           // the shadow of shared memory; cp.async lands late and memory is poisoned either way
};

enum class Operation : uint8_t {
  kNone,
  kShflXor,
  kUniform,
  kAnyLane,
  kAllLanes,
  kLdmatrix,
  kLdmatrixTrans,
  kMmaBf16,
  kMmaFp16,
  kSyncWarp,
  kSyncThreads,
  kBarSync,
  kBarArrive,
  kSyncThreadsOr,
  kBarSyncOr,
  kMbarrierWait,
  kWaitUntilEqual,
  kStmatrix,
  kElectOne,
  kSetmaxnreg,
  kWgmmaWait,
  kDrawTicket
};
inline const char* operation_name(Operation operation) {
  static const char* const names[] = {"nothing",           "shfl_xor",           "uniform",
                                      "any_lane",          "all_lanes",          "ldmatrix_x4",
                                      "ldmatrix_x4_trans", "mma_m16n8k16<bf16>", "mma_m16n8k16<fp16>",
                                      "sync_warp",         "sync_threads",       "bar_sync",
                                      "bar_arrive",        "sync_threads_or",    "bar_sync_or",
                                      "mbarrier_wait",     "wait_until_equal",   "stmatrix_x4",
                                      "elect_one",         "setmaxnreg",         "wgmma_wait",
                                      "draw_ticket"};
  return names[int(operation)];
}

struct AsyncCopy {
  unsigned dst;
  int valid_bytes;
  unsigned group;
  uint32_t batch;  // which of its thread's batches that mbarriers track; 0 for none
  const void* src;
  Site site;
};

struct Fiber {
  Context context;
  unsigned tid = 0;
  bool done = false;
  Operation waits = Operation::kNone;  // the collective that it is blocked in
  Site site{0};  // the primitive that it executed last
  const char* trace_name = nullptr;
  int trace_value = 0;
  unsigned groups_committed = 0;
  std::vector<AsyncCopy> copies;  // in issue order, not landed
  ThreadClock clock;
  CopyBatches batches;
  unsigned mbarrier = 0, parity = 0;  // what it waits for, in mbarrier_wait
  const unsigned* semaphore = nullptr;  // and in wait_until_equal
  unsigned wanted = 0;
  const void* tickets = nullptr;  // and in draw_ticket
};

struct Warp {
  Operation operation = Operation::kNone;
  Site site{0};
  unsigned arrived = 0;
  int barrier_id = -1, barrier_threads = 0;
  Lane lanes[kWarpSize];
  uint32_t clock[kMaxWarps] = {};  // see thread_clock.h
  bool any = false;  // the result of sync_threads_or and bar_sync_or
};

struct Barrier {
  int expected = 0, arrived = 0;
  Operation operation = Operation::kNone;
  Site site{0};
  uint32_t waiting = 0;  // a bit for each warp
  uint32_t joined[kMaxWarps] = {};  // the newest epoch of each warp that has arrived, directly or through another
  Knowledge known;  // what the threads that arrived know beyond that
  bool any = false;  // a predicate of sync_threads_or or bar_sync_or
};

}  // namespace emulator
