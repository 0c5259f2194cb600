// What a launch did. The order is the order in which the Python side reads them (fa2gen/emulator/runner.py).
#pragma once
#include <cstdint>

namespace emulator {

struct Counters {
  uint64_t mma = 0, ldmatrix = 0, ldmatrix_conflicts = 0;
  uint64_t ld_shared_conflicts = 0, st_shared_conflicts = 0, cp_async_conflicts = 0;
  uint64_t shfl = 0, votes = 0, barriers = 0, cp_async = 0, ex2 = 0, switches = 0;
  uint64_t wgmma = 0, tma_load = 0, tma_store = 0, stmatrix = 0, stmatrix_conflicts = 0;

  void add(const Counters& other) {
    uint64_t* mine = &mma;
    const uint64_t* theirs = &other.mma;
    for (size_t i = 0; i < sizeof(Counters) / sizeof(uint64_t); i++) mine[i] += theirs[i];
  }
};

}  // namespace emulator
