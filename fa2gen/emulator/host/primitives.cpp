// The runtime's side of the primitives that runtime.h declares.
#include <cstring>

#include "block.h"

namespace emulator {

__thread unsigned current_tid = 0;
__thread Dim3 current_block_index = {}, current_grid = {};
__thread Block* Block::running = nullptr;

namespace {

// Every primitive that can fail begins here: reports name the line that the fiber executed last.
Block& enter(Site site) {
  Block& block = *Block::running;
  block.current->site = site;
  return block;
}

}  // namespace

void name_shared(const char* name, unsigned address, unsigned bytes) {
  Block::running->shared.name_region(name, address, bytes);
}
void trace(const char* name, int value) {
  Fiber& fiber = *Block::running->current;
  fiber.trace_name = name, fiber.trace_value = value;
}
int block_threads() { return int(Block::running->num_threads()); }

// ---- Memory

const void* read_shared(unsigned address, unsigned bytes, Site site) {
  Block& block = enter(site);
  block.shared.read(address, bytes, block.accessor(), "ld_shared", site);
  block.conflicts().record(site, block.lane_index(), address, bytes, &block.counters.ld_shared_conflicts);
  return block.shared.at(address);
}
void* write_shared(unsigned address, unsigned bytes, Site site) {
  Block& block = enter(site);
  block.shared.write(address, bytes, block.accessor(), false, "st_shared", site);
  block.conflicts().record(site, block.lane_index(), address, bytes, &block.counters.st_shared_conflicts);
  return block.shared.at(address);
}
const void* read_global(const void* address, unsigned bytes, Site site) {
  Block& block = enter(site);
  block.global.check_read(address, bytes, bytes, "ld_global reads", block.recent_buffer);
  return address;
}
void* write_global(void* address, unsigned bytes, Site site) {
  Block& block = enter(site);
  block.global.check_write(address, bytes, false, block.block_number, "st_global writes", block.recent_buffer);
  return address;
}
void atomic_add(float* address, float value, Site site) {
  Block& block = enter(site);
  block.global.check_write(address, 4, true, block.block_number, "atomic_add on", block.recent_buffer);
  block.add(address, value, "atomic_add");
}
void atomic_add4(float* address, const float (&values)[4], Site site) {
  Block& block = enter(site);
  block.global.check_write(address, 16, true, block.block_number, "atomic_add4 on", block.recent_buffer);
  for (int i = 0; i < 4; i++) block.add(address + i, values[i], "atomic_add4");
}
void atomic_add(unsigned* address, unsigned value, Site site) {
  Block& block = enter(site);
  block.global.check_write(address, 4, true, block.block_number, "atomic_add on", block.recent_buffer);
  __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
  if (block.grid.semaphores.in_use()) block.grid.semaphores.changed();
}
void release_add(unsigned* address, unsigned value, Site site) {
  Block& block = enter(site);
  block.global.check_write(address, 4, true, block.block_number, "release_add on", block.recent_buffer);
  block.release_add(address, value);
}
void wait_until_equal(const unsigned* address, unsigned value, Site site) {
  Block& block = enter(site);
  block.global.check_wait(address, "wait_until_equal reads", block.recent_buffer);
  block.wait_until_equal(address, value);
}
unsigned look(const unsigned* address, Site site) {
  Block& block = enter(site);
  block.global.check_wait(address, "look_and_release_add reads", block.recent_buffer);
  return block.look(address);
}

// ---- Asynchronous copies land at the wait, as late as the rules allow; until then their target holds NaN.

void cp_async16(unsigned dst, const void* src, int valid_bytes, Site site) {
  Block& block = enter(site);
  block.counters.cp_async++;
  if (valid_bytes < 0 || valid_bytes > 16)
    throw Diagnostic("cp-async-size", format("valid_bytes is %d; 0 to 16 are possible", valid_bytes));
  if (reinterpret_cast<uintptr_t>(src) % 16)
    throw Diagnostic("global-misaligned", "the source of a cp.async of 16 bytes is not aligned to 16 bytes");
  if (valid_bytes) block.global.check_read(src, valid_bytes, 1, "cp_async16 reads", block.recent_buffer);
  block.shared.write(dst, 16, block.accessor(), true, "cp_async16", site);
  block.conflicts().record(site, block.lane_index(), dst, 16, &block.counters.cp_async_conflicts);
  std::memset(block.shared.at(dst), 0xff, 16);
  block.current->copies.push_back({dst, valid_bytes, block.current->groups_committed, 0, src, site});
}
void cp_async_commit() { Block::running->current->groups_committed++; }
void cp_async_wait(unsigned pending) {
  Block& block = *Block::running;
  Fiber& fiber = *block.current;
  auto waited = [&](unsigned group) { return group + pending < fiber.groups_committed; };
  block.land_copies(fiber, [&](const AsyncCopy& copy) { return waited(copy.group); });
  auto& batches = fiber.batches.not_waited;
  while (!batches.empty() && waited(batches.front().group)) {
    fiber.clock.known.raise(block.num_threads() + fiber.tid, batches.front().number);
    batches.erase(batches.begin());
  }
}

// ---- Barriers

void barrier(BarrierKind kind, int id, int threads, Site site) {
  const Operation operation = kind == BarrierKind::kSyncThreads ? Operation::kSyncThreads
                              : kind == BarrierKind::kBarSync   ? Operation::kBarSync
                                                                : Operation::kBarArrive;
  enter(site).barrier(operation, id, threads);
}
void sync_warp(Site site) {
  Block& block = enter(site);
  block.rendezvous(Operation::kSyncWarp, -1, 0, [&](Warp&) {
    block.synchronise(block.warp_index());
    return true;
  });
}
bool sync_threads_or(bool predicate, Site site) {
  Block& block = enter(site);
  block.lane().a[0] = predicate;
  block.barrier(Operation::kSyncThreadsOr, 0, int(block.num_threads()));
  return block.warp().any;
}
bool bar_sync_or(int id, int threads, bool predicate, Site site) {
  Block& block = enter(site);
  block.lane().a[0] = predicate;
  block.barrier(Operation::kBarSyncOr, id, threads);
  return block.warp().any;
}

void mbarrier_init(unsigned address, int count, Site site) { enter(site).mbarrier_init(address, count); }
void mbarrier_arrive(unsigned address, Site site) { enter(site).mbarrier_arrive(address); }
void cp_async_mbarrier_arrive(unsigned address, Site site) { enter(site).cp_async_mbarrier_arrive(address); }
void mbarrier_wait(unsigned address, unsigned parity, Site site) { enter(site).mbarrier_wait(address, parity); }

// ---- Warp collectives: operands go to the lane's slot, the last lane to arrive computes for all.

unsigned shfl_xor(unsigned value, int lane_mask, Site site) {
  Block& block = enter(site);
  Lane& mine = block.lane();
  mine.a[0] = value, mine.a[1] = unsigned(lane_mask);
  block.rendezvous(Operation::kShflXor, -1, 0, [&](Warp& warp) {
    block.counters.shfl++;
    for (unsigned l = 0; l < kWarpSize; l++) warp.lanes[l].b[0] = warp.lanes[l ^ (warp.lanes[l].a[1] & 31)].a[0];
    return true;
  });
  return mine.b[0];
}

int uniform(int value, Site site) {
  Block& block = enter(site);
  Lane& mine = block.lane();
  mine.a[0] = unsigned(value);
  block.rendezvous(Operation::kUniform, -1, 0, [&](Warp& warp) {
    block.counters.shfl++;
    for (unsigned l = 1; l < kWarpSize; l++)
      if (warp.lanes[l].a[0] != warp.lanes[0].a[0])
        throw Diagnostic("uniform-differs",
                         format("lane 0 has %d, lane %u has %d", int(warp.lanes[0].a[0]), l, int(warp.lanes[l].a[0])));
    return true;
  });
  return value;
}

bool vote(Vote kind, bool predicate, Site site) {
  Block& block = enter(site);
  Lane& mine = block.lane();
  mine.a[0] = predicate;
  const bool any = kind == Vote::kAny;
  block.rendezvous(any ? Operation::kAnyLane : Operation::kAllLanes, -1, 0, [&](Warp& warp) {
    block.counters.votes++;
    unsigned count = 0;
    for (const Lane& lane : warp.lanes) count += lane.a[0];
    for (Lane& lane : warp.lanes) lane.b[0] = any ? count > 0 : count == kWarpSize;
    return true;
  });
  return mine.b[0];
}

void ldmatrix_x4(unsigned* r, unsigned row_address, bool trans, Site site) {
  Block& block = enter(site);
  Lane& mine = block.lane();
  mine.a[0] = row_address;
  const Operation operation = trans ? Operation::kLdmatrixTrans : Operation::kLdmatrix;
  block.rendezvous(operation, -1, 0, [&](Warp& warp) {
    block.counters.ldmatrix++;
    unsigned rows[4][8][4];  // matrix, row, pair of elements
    const unsigned first = block.warp_index() * kWarpSize;
    block.begin_collective();
    for (unsigned m = 0; m < 4; m++) {
      unsigned columns = 0;  // which of the eight 16-byte groups of banks the 8 rows of one matrix touch
      for (unsigned i = 0; i < 8; i++) {
        const unsigned address = warp.lanes[m * 8 + i].a[0];
        block.shared.read(address, 16, block.accessor(first + m * 8 + i), operation_name(operation), site, true);
        std::memcpy(rows[m][i], block.shared.at(address), 16);
        columns |= 1u << address / 16 % 8;
      }
      block.counters.ldmatrix_conflicts += 8 - unsigned(__builtin_popcount(columns));
    }
    for (unsigned l = 0; l < kWarpSize; l++) {
      const unsigned g = l / 4, t = l % 4, shift = g % 2 * 16;
      for (unsigned m = 0; m < 4; m++)
        warp.lanes[l].a[m] =
            trans ? (rows[m][2 * t][g / 2] >> shift & 0xffff) | (rows[m][2 * t + 1][g / 2] >> shift & 0xffff) << 16
                  : rows[m][g][t];
    }
    return true;
  });
  std::memcpy(r, mine.a, 16);
}

void mma_m16n8k16(Element element, bool init, float* d, const unsigned* a, unsigned b0, unsigned b1, Site site) {
  Block& block = enter(site);
  Lane& mine = block.lane();
  std::memcpy(mine.a, a, 16);
  mine.b[0] = b0, mine.b[1] = b1;
  if (init)
    std::memset(mine.c, 0, 16);
  else
    std::memcpy(mine.c, d, 16);
  const bool is_bf16 = element == Element::kBf16;
  block.rendezvous(is_bf16 ? Operation::kMmaBf16 : Operation::kMmaFp16, -1, 0, [&](Warp& warp) {
    block.counters.mma++;
    if (is_bf16)
      warp_mma<Element::kBf16>(warp.lanes);
    else
      warp_mma<Element::kFp16>(warp.lanes);
    return true;
  });
  std::memcpy(d, mine.c, 16);
}

// ---- Arithmetic of one thread

float ex2(float x) {
  Block::running->counters.ex2++;
  return flush(std::exp2(flush(x)));
}
float lg2(float x) { return std::log2(x); }
float rcp(float x) { return flush(1 / flush(x)); }
// PTX's max and min: a number wins over a NaN, and +0 is greater than -0.
float max_f32(float a, float b) {
  if (a > b || b != b) return a;
  return a == b && a == 0 ? bits_to_float(float_to_bits(a) & float_to_bits(b)) : b;
}
float min_f32(float a, float b) {
  if (a < b || b != b) return a;
  return a == b && a == 0 ? bits_to_float(float_to_bits(a) | float_to_bits(b)) : b;
}
unsigned pack2(Element element, float lo, float hi) {
  return element == Element::kBf16 ? float_to_bf16(hi) << 16 | float_to_bf16(lo)
                                   : float_to_fp16(hi) << 16 | float_to_fp16(lo);
}

float to_float(Element element, unsigned bits) {
  return element == Element::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

}  // namespace emulator
