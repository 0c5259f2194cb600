// Host twin of templates/sm80/primitives.cuh, conversions.cuh and reductions.cuh: the same names, over the emulator's
// runtime. Comes after the text of templates/common/types.cuh; the kernel text follows it.
#pragma once
#include "runtime.h"

#define EMULATOR_SITE emulator::Site site = emulator::site_of(__builtin_LINE())

struct EmulatorThreadIndex {
  u32 x, y = 0, z = 0;
};
#define threadIdx (EmulatorThreadIndex{emulator::current_tid})
#define blockIdx (emulator::current_block_index)
#define gridDim (emulator::current_grid)

template <class Element>
constexpr emulator::Element emulator_element();
template <>
constexpr emulator::Element emulator_element<bf16>() {
  return emulator::Element::kBf16;
}
template <>
constexpr emulator::Element emulator_element<fp16>() {
  return emulator::Element::kFp16;
}

// What a header that follows adds to primitives that take floats, through a specialisation for EmulatorAny.
struct EmulatorAny;
template <class>
struct EmulatorResults {
  static constexpr bool kChecked = false;
};
#define EMULATOR_CHECK_RESULTS(...) \
  if constexpr (EmulatorResults<Any>::kChecked) EmulatorResults<Any>::check(site, __VA_ARGS__)
#define EMULATOR_CHECK_BYTES(value) \
  if constexpr (EmulatorResults<Any>::kChecked) EmulatorResults<Any>::check_bytes(site, value)

// ---- Shared memory

inline u32 smem_base() { return emulator::kSmemBase; }
inline void name_shared(const char* name, u32 address, u32 bytes) { emulator::name_shared(name, address, bytes); }
inline void trace(const char* name, int value) { emulator::trace(name, value); }

template <class V>
inline V ld_shared(u32 address, EMULATOR_SITE) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  V value;
  __builtin_memcpy(&value, emulator::read_shared(address, sizeof(V), site), sizeof(V));
  return value;
}
template <class V, class Any = EmulatorAny>
inline void st_shared(u32 address, V value, EMULATOR_SITE) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  EMULATOR_CHECK_BYTES(value);
  __builtin_memcpy(emulator::write_shared(address, sizeof(V), site), &value, sizeof(V));
}

// ---- Global memory

template <class V, class T>
inline V ld_global(gptr<T> p, EMULATOR_SITE) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  V value;
  __builtin_memcpy(&value, emulator::read_global(p.address, sizeof(V), site), sizeof(V));
  return value;
}
template <class T, class V, class Any = EmulatorAny>
inline void st_global(gptr<T> p, V value, EMULATOR_SITE) {
  static_assert(sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "2, 4, 8 or 16 bytes");
  EMULATOR_CHECK_BYTES(value);
  __builtin_memcpy(emulator::write_global(p.address, sizeof(V), site), &value, sizeof(V));
}
template <class T>
inline void atomic_add(gptr<T> p, T value, EMULATOR_SITE) {
  emulator::atomic_add(p.address, value, site);
}
inline void atomic_add4(gptr<float> p, float a, float b, float c, float d, EMULATOR_SITE) {
  emulator::atomic_add4(p.address, {a, b, c, d}, site);
}
inline void wait_until_equal(gptr<u32> p, u32 value, EMULATOR_SITE) {
  emulator::wait_until_equal(p.address, value, site);
}
inline void release_add(gptr<u32> p, u32 value, EMULATOR_SITE) { emulator::release_add(p.address, value, site); }
inline u32 look_and_release_add(gptr<u32> p, gptr<u32> released, u32 value, EMULATOR_SITE) {
  const u32 seen = emulator::look(p.address, site);
  if (released.address) emulator::release_add(released.address, value, site);
  return seen;
}

// ---- Asynchronous copies

template <class T>
inline void cp_async16(u32 dst, gptr<T> src, EMULATOR_SITE) {
  emulator::cp_async16(dst, src.address, 16, site);
}
template <class T>
inline void cp_async16(u32 dst, gptr<T> src, int valid_bytes, EMULATOR_SITE) {
  emulator::cp_async16(dst, src.address, valid_bytes, site);
}
inline void cp_async_commit() { emulator::cp_async_commit(); }
template <int kPending>
inline void cp_async_wait() {
  emulator::cp_async_wait(kPending);
}

// ---- Barriers

inline void sync_threads(EMULATOR_SITE) {
  emulator::barrier(emulator::BarrierKind::kSyncThreads, 0, emulator::block_threads(), site);
}
inline void sync_warp(EMULATOR_SITE) { emulator::sync_warp(site); }
inline void bar_sync(int id, int threads, EMULATOR_SITE) {
  emulator::barrier(emulator::BarrierKind::kBarSync, id, threads, site);
}
inline void bar_arrive(int id, int threads, EMULATOR_SITE) {
  emulator::barrier(emulator::BarrierKind::kBarArrive, id, threads, site);
}

inline bool sync_threads_or(bool predicate, EMULATOR_SITE) { return emulator::sync_threads_or(predicate, site); }
inline bool bar_sync_or(int id, int threads, bool predicate, EMULATOR_SITE) {
  return emulator::bar_sync_or(id, threads, predicate, site);
}

inline void mbarrier_init(u32 address, int count, EMULATOR_SITE) { emulator::mbarrier_init(address, count, site); }
inline void mbarrier_arrive(u32 address, EMULATOR_SITE) { emulator::mbarrier_arrive(address, site); }
inline void cp_async_mbarrier_arrive(u32 address, EMULATOR_SITE) { emulator::cp_async_mbarrier_arrive(address, site); }
inline void mbarrier_wait(u32 address, u32 parity, EMULATOR_SITE) { emulator::mbarrier_wait(address, parity, site); }

// ---- Warp collectives

template <class T, class Any = EmulatorAny>
inline T shfl_xor(T value, int lane_mask, EMULATOR_SITE) {
  static_assert(sizeof(T) == 4, "32-bit values");
  EMULATOR_CHECK_BYTES(value);
  u32 r;
  __builtin_memcpy(&r, &value, 4);
  r = emulator::shfl_xor(r, lane_mask, site);
  __builtin_memcpy(&value, &r, 4);
  return value;
}
inline int uniform(int x, EMULATOR_SITE) { return emulator::uniform(x, site); }
inline bool any_lane(bool predicate, EMULATOR_SITE) { return emulator::vote(emulator::Vote::kAny, predicate, site); }
inline bool all_lanes(bool predicate, EMULATOR_SITE) { return emulator::vote(emulator::Vote::kAll, predicate, site); }
inline void ldmatrix_x4(u32 (&r)[4], u32 row_address, EMULATOR_SITE) {
  emulator::ldmatrix_x4(r, row_address, false, site);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 row_address, EMULATOR_SITE) {
  emulator::ldmatrix_x4(r, row_address, true, site);
}
template <class Element>
inline void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
  emulator::mma_m16n8k16(emulator_element<Element>(), false, d, a, b0, b1, site);
}
template <class Element>
inline void mma_m16n8k16_init(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
  emulator::mma_m16n8k16(emulator_element<Element>(), true, d, a, b0, b1, site);
}

// ---- Arithmetic of one thread

inline float neg_inf() { return -__builtin_inff(); }
template <class Any = EmulatorAny>
inline float max_f32(float a, float b, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(a, b);
  return emulator::max_f32(a, b);
}
template <class Any = EmulatorAny>
inline float min_f32(float a, float b, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(a, b);
  return emulator::min_f32(a, b);
}
inline int max_i32(int a, int b) { return a > b ? a : b; }
inline int min_i32(int a, int b) { return a < b ? a : b; }
inline u32 opaque(u32 x) { return x; }
template <class Any = EmulatorAny>
inline float fma_f32(float a, float b, float c, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(a, b, c);
  return __builtin_fmaf(a, b, c);
}
template <class Any = EmulatorAny>
inline float abs_f32(float x, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(x);
  return __builtin_fabsf(x);
}
template <class Any = EmulatorAny>
inline float ex2(float x, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(x);
  return emulator::ex2(x);
}
template <class Any = EmulatorAny>
inline float lg2(float x, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(x);
  return emulator::lg2(x);
}
template <class Any = EmulatorAny>
inline float rcp(float x, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(x);
  return emulator::rcp(x);
}
template <class Element, class Any = EmulatorAny>
inline u32 pack2(float lo, float hi, EMULATOR_SITE) {
  EMULATOR_CHECK_RESULTS(lo, hi);
  return emulator::pack2(emulator_element<Element>(), lo, hi);
}
template <class Element>
inline float unpack_low(u32 pair) {
  return emulator::to_float(emulator_element<Element>(), pair & 0xffff);
}
template <class Element>
inline float unpack_high(u32 pair) {
  return emulator::to_float(emulator_element<Element>(), pair >> 16);
}

// ---- The glue that the build appends after the kernel text: EMULATOR_ENTRY(name of the kernel)

template <class Params>
inline void emulator_call(void (*kernel)(Params), const void* params) {
  Params copy;
  __builtin_memcpy(&copy, params, sizeof(Params));
  kernel(copy);
}
template <class Params>
constexpr u32 emulator_params_size(void (*)(Params)) {
  return sizeof(Params);
}
#define EMULATOR_ENTRY(kernel)                                               \
  extern "C" const u32 emulator_params_bytes = emulator_params_size(kernel); \
  extern "C" void emulator_call_kernel(const void* params) { emulator_call(kernel, params); }
