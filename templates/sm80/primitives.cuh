// ---- Instructions: one function for each, as PTX, so no CUDA header is needed and nvcc and NVRTC both take this file
//
// Every access to memory is a volatile asm statement. The compiler keeps those in program order, so accesses need no
// "memory" clobber among themselves; barriers, waits and asynchronous copies carry one all the same.

// Shared memory: addresses are 32-bit offsets in the shared window, never pointers. V has 2, 4, 8 or 16 bytes; the
// address is a multiple of its size.

// First byte of the block's dynamic shared memory.
FUNC u32 smem_base() {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  u32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(dynamic_smem));
  return address;
}

// Labels for tools that run this text on a CPU, as fa2gen's emulator does: an area of shared memory (name, address,
// bytes), and where the kernel is (name, index). They compile to nothing.
FUNC void name_shared(const char*, u32, u32) {}
FUNC void trace(const char*, int) {}

template <class V>
FUNC V ld_shared(u32 address) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  if constexpr (sizeof(V) == 16) {
    u32x4 r;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address));
    return bits_as<V>(r);
  } else if constexpr (sizeof(V) == 8) {
    u32x2 r;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address));
    return bits_as<V>(r);
  } else if constexpr (sizeof(V) == 4) {
    u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address));
    return bits_as<V>(r);
  } else {
    u16 r;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(r) : "r"(address));
    return bits_as<V>(r);
  }
}
template <class V>
FUNC void st_shared(u32 address, V value) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  if constexpr (sizeof(V) == 16) {
    const u32x4 r = bits_as<u32x4>(value);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w));
  } else if constexpr (sizeof(V) == 8) {
    const u32x2 r = bits_as<u32x2>(value);
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(r.x), "r"(r.y));
  } else if constexpr (sizeof(V) == 4) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(bits_as<u32>(value)));
  } else {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bits_as<u16>(value)));
  }
}

// Global memory: V has 2, 4, 8 or 16 bytes; the address is a multiple of its size.

template <class V, class T>
FUNC V ld_global(gptr<T> p) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  if constexpr (sizeof(V) == 16) {
    u32x4 r;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p.address));
    return bits_as<V>(r);
  } else if constexpr (sizeof(V) == 8) {
    u32x2 r;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p.address));
    return bits_as<V>(r);
  } else if constexpr (sizeof(V) == 4) {
    u32 r;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(r) : "l"(p.address));
    return bits_as<V>(r);
  } else {
    u16 r;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(r) : "l"(p.address));
    return bits_as<V>(r);
  }
}
template <class T, class V>
FUNC void st_global(gptr<T> p, V value) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  if constexpr (sizeof(V) == 16) {
    const u32x4 r = bits_as<u32x4>(value);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p.address), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w));
  } else if constexpr (sizeof(V) == 8) {
    const u32x2 r = bits_as<u32x2>(value);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p.address), "r"(r.x), "r"(r.y));
  } else if constexpr (sizeof(V) == 4) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(p.address), "r"(bits_as<u32>(value)));
  } else {
    asm volatile("st.global.b16 [%0], %1;" ::"l"(p.address), "h"(bits_as<u16>(value)));
  }
}
template <class T>
FUNC void atomic_add(gptr<T> p, T value);
template <>
FUNC void atomic_add<float>(gptr<float> p, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p.address), "f"(value));
}
template <>
FUNC void atomic_add<u32>(gptr<u32> p, u32 value) {
  asm volatile("red.global.add.u32 [%0], %1;" ::"l"(p.address), "r"(value));
}

// Asynchronous copies of 16 bytes from global to shared memory, past L1.

template <class T>
FUNC void cp_async16(u32 dst, gptr<T> src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src.address) : "memory");
}
// The first valid_bytes come from src, the rest is zero. src must be 16-byte aligned even where nothing is read.
template <class T>
FUNC void cp_async16(u32 dst, gptr<T> src, int valid_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src.address), "r"(valid_bytes)
               : "memory");
}
FUNC void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's committed groups are in flight.
template <int kPending>
FUNC void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Barriers.

FUNC void sync_threads() { asm volatile("bar.sync 0;" ::: "memory"); }
FUNC void sync_warp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
// Named barriers 1 to 15; threads counts those that sync and those that arrive, a multiple of 32.
FUNC void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
FUNC void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// A barrier of the block; true for every thread if the predicate is for any.
FUNC bool sync_threads_or(bool predicate) {
  u32 any;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.or.pred p, 0, p; selp.u32 %0, 1, 0, p; }"
               : "=r"(any)
               : "r"(u32(predicate))
               : "memory");
  return any != 0;
}

// The same for the threads of a named barrier.
FUNC bool bar_sync_or(int id, int threads, bool predicate) {
  u32 any;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.or.pred p, %2, %3, p; selp.u32 %0, 1, 0, p; }"
               : "=r"(any)
               : "r"(u32(predicate)), "r"(id), "r"(threads)
               : "memory");
  return any != 0;
}

// Barriers in shared memory: 8 bytes at a multiple of 8. A phase completes with its count-th arrival, and the next one
// begins; phases have parity 0, 1, 0, ...

// One thread initialises; others may use it after a barrier of the block.
FUNC void mbarrier_init(u32 address, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
}
// Releases what this thread read and wrote.
FUNC void mbarrier_arrive(u32 address) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address) : "memory");
}
// An arrival once all earlier cp.async of this thread have landed. It releases them, nothing else of the thread.
FUNC void cp_async_mbarrier_arrive(u32 address) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address) : "memory");
}
// Waits for the phase of this parity; returns at once in a phase of the other one. Acquires what its arrivals release.
FUNC void mbarrier_wait(u32 address, u32 parity) {
  asm volatile(
      "{ .reg .pred done; "
      "spin: mbarrier.test_wait.parity.shared.b64 done, [%0], %1; "
      "@!done bra spin; }" ::"r"(address),
      "r"(parity)
      : "memory");
}

// Warp collectives: all 32 lanes, at one place in the text.

template <class T>
FUNC T shfl_xor(T value, int lane_mask) {
  static_assert(sizeof(T) == 4, "32-bit values");
  u32 r = bits_as<u32>(value);
  asm volatile("shfl.sync.bfly.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(r) : "r"(lane_mask));
  return bits_as<T>(r);
}
FUNC bool any_lane(bool predicate) {
  u32 any;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(any)
               : "r"(u32(predicate)));
  return any != 0;
}
FUNC bool all_lanes(bool predicate) {
  u32 all;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(all)
               : "r"(u32(predicate)));
  return all != 0;
}
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane l receives elements
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each; with trans, those of column l / 4.
FUNC void ldmatrix_x4(u32 (&r)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address));
}
FUNC void ldmatrix_x4_trans(u32 (&r)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address));
}

// d += a b: 16x8 += 16x16 times 16x8, float32 accumulation, fragments as in the PTX manual's m16n8k16.
template <class Element>
FUNC void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
FUNC void mma_m16n8k16<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
FUNC void mma_m16n8k16<fp16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d = a b: the accumulator operand is the constant zero, so no register has to be cleared first.
template <class Element>
FUNC void mma_m16n8k16_init(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
FUNC void mma_m16n8k16_init<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
template <>
FUNC void mma_m16n8k16_init<fp16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// Arithmetic of one thread.

// x, but the compiler cannot see where it comes from: it keeps the value instead of computing it again in a loop.
FUNC u32 opaque(u32 x) {
  u32 y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

FUNC float neg_inf() { return bits_as<float>(0xff800000u); }
// A NaN operand loses against a number.
FUNC float max_f32(float a, float b) {
  float y;
  asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
FUNC float min_f32(float a, float b) {
  float y;
  asm("min.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
FUNC int max_i32(int a, int b) { return a > b ? a : b; }
FUNC int min_i32(int a, int b) { return a < b ? a : b; }
// a b + c, rounded once.
FUNC float fma_f32(float a, float b, float c) {
  float y;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
FUNC float abs_f32(float x) {
  float y;
  asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^x within 2 ulp; results below 2^-126 are zero.
FUNC float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FUNC float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x within 1 ulp; subnormal operands and results are zero.
FUNC float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two floats rounded to nearest even, lo in the low half.
template <class Element>
FUNC u32 pack2(float lo, float hi);
template <>
FUNC u32 pack2<bf16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <>
FUNC u32 pack2<fp16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
