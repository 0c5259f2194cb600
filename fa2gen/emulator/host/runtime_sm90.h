// What a kernel of sm_90a calls beyond runtime.h. Includes nothing but that.
#pragma once
#include "runtime.h"

namespace emulator {

// What the accumulators of a wgmma hold from its issue to the wait: a NaN of its own. It is a signalling one, so that
// arithmetic leaves a trace in it.
constexpr unsigned kPendingResult = 0x7fa5c3d1, kUsedResult = kPendingResult | 0x400000;

// One wgmma, as a thread of the warpgroup issues it.
struct WgmmaIssue {
  Element element;
  unsigned n;
  bool a_in_registers, transposed_b, accumulate;
  float* d;                       // n / 2
  const unsigned* a_registers;    // 4
  unsigned long long a, b;        // descriptors

  const char* name() const { return a_in_registers ? "wgmma_rs" : "wgmma_ss"; }
};

void tma_prefetch_map(const void* map, Site site);
void tma_load(unsigned dst, const void* map, unsigned mbarrier, const int (&at)[4], Site site);
void tma_store(const void* map, unsigned src, const int (&at)[4], Site site);
void tma_store_commit(Site site);
void tma_store_wait_read(unsigned pending, Site site);

void fence_proxy_async(Site site);
void fence_mbarrier_init(Site site);
void mbarrier_arrive_expect_tx(unsigned address, unsigned bytes, Site site);

bool elect_one(Site site);
void stmatrix_x4(unsigned row_address, const unsigned (&r)[4], Site site);

void setmaxnreg(unsigned registers, bool increase, Site site);
void wgmma_fence(Site site);
void wgmma(const WgmmaIssue& issue, Site site);
void wgmma_commit(Site site);
void wgmma_wait(unsigned pending, Site site);
void use_of_pending_result(Site site);

void open_tickets(unsigned long long* address, Site site);
unsigned draw_ticket(unsigned long long* address, unsigned last, Site site);

}  // namespace emulator
