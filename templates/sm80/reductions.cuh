// ---- Instructions by which blocks add to the same elements of global memory, and order their additions

// Adds to four neighbours, each a sum of its own; p is a multiple of 16 bytes. sm_90 and up.
FUNC void atomic_add4(gptr<float> p, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p.address), "f"(a), "f"(b), "f"(c),
               "f"(d));
}

// Semaphores: words that count. A block waits for what blocks of smaller indices release, never for later ones: these
// may not have started.

// Waits until the word has the value; acquires what was released by those who brought it there. One lane waits for its
// warp, before sync_warp().
FUNC void wait_until_equal(gptr<u32> p, u32 value) {
  asm volatile(
      "{ .reg .pred equal; .reg .u32 now; "
      "spin: ld.acquire.gpu.global.u32 now, [%0]; "
      "setp.eq.u32 equal, now, %1; "
      "@!equal bra spin; }" ::"l"(p.address),
      "r"(value)
      : "memory");
}
// Adds to the word; releases what this thread did and learnt of. One lane releases for its warp, after sync_warp(), or
// for its block, after a barrier.
FUNC void release_add(gptr<u32> p, u32 value) {
  asm volatile(
      "fence.acq_rel.gpu; "
      "red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p.address),
      "r"(value)
      : "memory");
}
// Both without a wait and with one fence: the word's value, acquired, and an addition to another word, null for none.
FUNC u32 look_and_release_add(gptr<u32> p, gptr<u32> released, u32 value) {
  u32 seen;
  asm volatile(
      "{ .reg .pred any; "
      "setp.ne.u64 any, %2, 0; "
      "ld.relaxed.gpu.global.u32 %0, [%1]; "
      "fence.acq_rel.gpu; "
      "@any red.relaxed.gpu.global.add.u32 [%2], %3; }"
      : "=r"(seen)
      : "l"(p.address), "l"(released.address), "r"(value)
      : "memory");
  return seen;
}
