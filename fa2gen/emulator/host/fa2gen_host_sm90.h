// Host twin of templates/sm90/primitives.cuh and wgmma.cuh.j2. Comes after fa2gen_host.h; the text of
// templates/sm90/types.cuh precedes both.
#pragma once
#include "fa2gen_host.h"
#include "runtime_sm90.h"

// ---- Results of wgmma that are used before they are there

inline bool emulator_is_pending(float value) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  return (bits | 0x400000) == emulator::kUsedResult;
}
template <>
struct EmulatorResults<EmulatorAny> {
  static constexpr bool kChecked = true;
  static void check(emulator::Site site, float a, float b = 0, float c = 0) {
    if (emulator_is_pending(a) || emulator_is_pending(b) || emulator_is_pending(c))
      emulator::use_of_pending_result(site);
  }
  template <class V>
  static void check_bytes(emulator::Site site, const V& value) {
    if constexpr (sizeof(V) % 4 == 0)
      for (unsigned i = 0; i < sizeof(V) / 4; i++) {
        float word;
        __builtin_memcpy(&word, reinterpret_cast<const char*>(&value) + 4 * i, 4);
        if (emulator_is_pending(word)) emulator::use_of_pending_result(site);
      }
  }
};

// ---- TMA

inline void tma_prefetch_map(const TensorMap& map, EMULATOR_SITE) { emulator::tma_prefetch_map(&map, site); }
inline void tma_load(u32 dst, const TensorMap& map, u32 mbarrier, int c0, int c1, int c2, int c3, EMULATOR_SITE) {
  emulator::tma_load(dst, &map, mbarrier, {c0, c1, c2, c3}, site);
}
inline void tma_store(const TensorMap& map, u32 src, int c0, int c1, int c2, int c3, EMULATOR_SITE) {
  emulator::tma_store(&map, src, {c0, c1, c2, c3}, site);
}
inline void tma_store_commit(EMULATOR_SITE) { emulator::tma_store_commit(site); }
template <int kPending>
inline void tma_store_wait_read(EMULATOR_SITE) {
  emulator::tma_store_wait_read(kPending, site);
}

inline void fence_proxy_async(EMULATOR_SITE) { emulator::fence_proxy_async(site); }

// ---- mbarriers

inline void fence_mbarrier_init(EMULATOR_SITE) { emulator::fence_mbarrier_init(site); }
inline void mbarrier_arrive_expect_tx(u32 address, u32 bytes, EMULATOR_SITE) {
  emulator::mbarrier_arrive_expect_tx(address, bytes, site);
}
inline void mbarrier_try_wait(u32 address, u32 parity, EMULATOR_SITE) {
  emulator::mbarrier_wait(address, parity, site);
}

// ---- Warps

inline bool elect_one(EMULATOR_SITE) { return emulator::elect_one(site); }
inline void stmatrix_x4(u32 row_address, u32 r0, u32 r1, u32 r2, u32 r3, EMULATOR_SITE) {
  emulator::stmatrix_x4(row_address, {r0, r1, r2, r3}, site);
}

// ---- Warpgroups

template <int kRegisters>
inline void setmaxnreg_dec(EMULATOR_SITE) {
  emulator::setmaxnreg(kRegisters, false, site);
}
template <int kRegisters>
inline void setmaxnreg_inc(EMULATOR_SITE) {
  emulator::setmaxnreg(kRegisters, true, site);
}
inline void wgmma_fence(EMULATOR_SITE) { emulator::wgmma_fence(site); }
inline void wgmma_commit(EMULATOR_SITE) { emulator::wgmma_commit(site); }
template <int kPending>
inline void wgmma_wait(EMULATOR_SITE) {
  emulator::wgmma_wait(kPending, site);
}
template <class Element, int kN, bool kTransposedB>
inline void wgmma_ss(float (&d)[kN / 2], u64 a, u64 b, bool accumulate, EMULATOR_SITE) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "8 to 256 columns, a multiple of 8");
  emulator::wgmma({emulator_element<Element>(), kN, false, kTransposedB, accumulate, d, nullptr, a, b}, site);
}
template <class Element, int kN, bool kTransposedB>
inline void wgmma_rs(float (&d)[kN / 2], const u32 (&a)[4], u64 b, bool accumulate, EMULATOR_SITE) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "8 to 256 columns, a multiple of 8");
  emulator::wgmma({emulator_element<Element>(), kN, true, kTransposedB, accumulate, d, a, 0, b}, site);
}

// ---- Tickets

constexpr u64 kTicketsOpen = 0x7b1d2f5300000000ull;
inline void open_tickets(gptr<u64> tickets, EMULATOR_SITE) { emulator::open_tickets(tickets.address, site); }
inline u32 draw_ticket(gptr<u64> tickets, u32 last, EMULATOR_SITE) {
  return emulator::draw_ticket(tickets.address, last, site);
}
