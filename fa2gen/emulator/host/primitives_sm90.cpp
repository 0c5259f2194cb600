// The runtime's side of the primitives that runtime_sm90.h declares.
#include <cstring>

#include "block.h"
#include "runtime_sm90.h"

namespace emulator {

namespace {

Block& enter(Site site) {
  Block& block = *Block::running;
  block.current->site = site;
  return block;
}

}  // namespace

void tma_prefetch_map(const void* map, Site site) {
  enter(site);
  TensorMapView::read(map, "tma_prefetch_map");
}
void tma_load(unsigned dst, const void* map, unsigned mbarrier, const int (&at)[4], Site site) {
  enter(site).tma_load(dst, map, mbarrier, at);
}
void tma_store(const void* map, unsigned src, const int (&at)[4], Site site) { enter(site).tma_store(map, src, at); }
void tma_store_commit(Site site) { enter(site).tma_store_commit(); }
void tma_store_wait_read(unsigned pending, Site site) { enter(site).tma_store_wait_read(pending); }

void fence_proxy_async(Site site) { enter(site).fence_proxy_async(); }
void fence_mbarrier_init(Site site) { enter(site).fence_mbarrier_init(); }
void mbarrier_arrive_expect_tx(unsigned address, unsigned bytes, Site site) {
  enter(site).mbarrier_arrive_expect_tx(address, bytes);
}

bool elect_one(Site site) {
  Block& block = enter(site);
  block.rendezvous(Operation::kElectOne, -1, 0, [](Warp&) { return true; });
  return block.lane_index() == 0;
}

void stmatrix_x4(unsigned row_address, const unsigned (&r)[4], Site site) {
  Block& block = enter(site);
  Lane& mine = block.lane();
  std::memcpy(mine.a, r, 16);
  mine.b[0] = row_address;
  block.rendezvous(Operation::kStmatrix, -1, 0, [&](Warp& warp) {
    block.counters.stmatrix++;
    const unsigned first = block.warp_index() * kWarpSize;
    for (unsigned m = 0; m < 4; m++) {
      unsigned columns = 0;  // as for ldmatrix
      for (unsigned i = 0; i < 8; i++) {
        const unsigned lane = m * 8 + i, address = warp.lanes[lane].b[0];
        block.shared.write(address, 16, block.accessor(first + lane), false, "stmatrix_x4", site);
        for (unsigned t = 0; t < 4; t++) std::memcpy(block.shared.at(address) + 4 * t, &warp.lanes[4 * i + t].a[m], 4);
        columns |= 1u << address / 16 % 8;
      }
      block.counters.stmatrix_conflicts += 8 - unsigned(__builtin_popcount(columns));
    }
    return true;
  });
}

void setmaxnreg(unsigned registers, bool increase, Site site) { enter(site).setmaxnreg(registers, increase); }

void wgmma_fence(Site site) {
  Block& block = enter(site);
  block.warpgroup().fence(block.current->tid % kWarpgroupSize, site);
}
void wgmma(const WgmmaIssue& issue, Site site) {
  Block& block = enter(site);
  block.warpgroup().issue(block.current->tid % kWarpgroupSize, issue, site);
}
void wgmma_commit(Site site) {
  Block& block = enter(site);
  block.warpgroup().commit(block.current->tid % kWarpgroupSize, site);
}
void wgmma_wait(unsigned pending, Site site) {
  Block& block = enter(site);
  block.warpgroup().wait(block.current->tid % kWarpgroupSize, pending, site);
}
void use_of_pending_result(Site site) {
  if (enter(site).options.checks)
    throw Diagnostic("wgmma-result-not-waited", "an operand is the result of a wgmma that was not waited for");
}

void open_tickets(unsigned long long* address, Site site) { enter(site).open_tickets(address); }
unsigned draw_ticket(unsigned long long* address, unsigned last, Site site) {
  return enter(site).draw_ticket(address, last);
}

}  // namespace emulator
