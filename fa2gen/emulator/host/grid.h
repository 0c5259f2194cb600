// What the blocks of a launch share.
#pragma once
#include "additions.h"
#include "global_memory.h"
#include "semaphores.h"
#include "tickets.h"

namespace emulator {

struct Grid {
  GlobalMemory& memory;
  Semaphores semaphores;
  Tickets tickets;
  Additions additions;

  Grid(GlobalMemory& global, unsigned workers)
      : memory(global), semaphores(workers), additions(global.buffers.size()) {}
};

}  // namespace emulator
