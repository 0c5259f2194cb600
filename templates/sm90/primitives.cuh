// ---- Instructions of sm_90a: bulk copies of tensor tiles (TMA), the mbarriers they arrive on, warpgroups
//
// The copy engine and wgmma reach shared memory by way of the asynchronous proxy. What a thread wrote with ordinary
// stores they see after that thread's fence_proxy_async() and a barrier; what TMA brought, whoever has waited for the
// mbarrier sees, wgmma included.

// TMA: one thread copies a box of a tensor; c0 is the column, c1 to c3 the row, head and batch where the box begins.

FUNC void tma_prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// To shared memory, at a multiple of 1024 bytes, with the map's swizzle; what lies outside the tensor becomes zero. The
// bytes of the whole box, zeros included, count towards what the mbarrier expects.
FUNC void tma_load(u32 dst, const TensorMap& map, u32 mbarrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(dst),
      "l"(&map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// From shared memory; what lies beyond the end of the tensor is not written. The box begins inside it or beyond: to
// begin before it is an illegal instruction (H200).
FUNC void tma_store(const TensorMap& map, u32 src, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// Stores of this thread since the last commit are a group.
FUNC void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups have yet to read shared memory.
template <int kPending>
FUNC void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Makes this thread's earlier stores to shared memory visible to the asynchronous proxy, once a barrier follows.
FUNC void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// mbarriers, whose phases may also wait for bytes of bulk copies.

// After mbarrier_init, by the thread that initialised, before the block's barrier: bulk copies may arrive then.
FUNC void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and makes the current phase wait for so many bytes more. It comes before the copies that bring them.
FUNC void mbarrier_arrive_expect_tx(u32 address, u32 bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(address),
               "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is complete; the thread is suspended for a while before it looks again.
FUNC void mbarrier_try_wait(u32 address, u32 parity) {
  asm volatile(
      "{ .reg .pred done; "
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
      "@!done bra again; }" ::"r"(address),
      "r"(parity)
      : "memory");
}

// Warps.

// True in one lane of the warp, the same each time.
FUNC bool elect_one() {
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}
// Four 8x8 matrices of 16-bit elements to shared memory: lane l gives the address of row l % 8 of matrix l / 8, and has
// of row l / 4 of each matrix the elements l % 4 * 2 and the next.
FUNC void stmatrix_x4(u32 row_address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// Warpgroups: four warps, the first of which has a number divisible by four.

// Registers of each thread from here on, 24 to 256, a multiple of 8; all warps of the warpgroup execute it.
template <int kRegisters>
FUNC void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FUNC void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders earlier accesses to registers before the wgmmas that follow. Between a wgmma and the wait that covers it
// nothing else may touch its accumulators or its A registers.
FUNC void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The wgmmas since the last commit are a group.
FUNC void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups are in flight.
template <int kPending>
FUNC void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tickets: numbers that blocks draw, 0 and up, each once. Beforehand the word holds anything but an open one (as
// old contents of memory do once in 2^32): a block opens it at its start, and the one that draws the last number closes
// it, so that the next launch finds it closed.

constexpr u64 kTicketsOpen = 0x7b1d2f5300000000ull;  // the high half of an open word; the low half is the next number

FUNC void open_tickets(gptr<u64> tickets) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(tickets.address), "l"(kTicketsOpen) : "memory");
}
// The next number; waits for the opening. `last` is the last number of all.
FUNC u32 draw_ticket(gptr<u64> tickets, u32 last) {
  u64 word;
  for (;;) {
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(word) : "l"(tickets.address) : "memory");
    if (word >> 32 == kTicketsOpen >> 32) break;
    // What was added to a closed word the opening overwrites.
    do {
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(tickets.address) : "memory");
    } while (word >> 32 != kTicketsOpen >> 32);
  }
  if (u32(word) == last) asm volatile("st.relaxed.gpu.global.u64 [%0], 0;" ::"l"(tickets.address) : "memory");
  return u32(word);
}
