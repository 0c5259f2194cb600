// ---- Rings of tiles in shared memory: who may read a stage, and who may refill it
//
// Each stage has a "full" mbarrier, on which TMA arrives with the tile's bytes, and an "empty" one, on which each
// consumer warp arrives when it is done with the tile. The n-th use of a stage waits for the n-th phase.

// Where a ring stands: a stage, and the parity of the phase of its current use in bit 4. One register, for consumers
// have none to spare.
using RingPosition = u32;

FUNC int stage_of(RingPosition at) { return at & 15; }
FUNC u32 phase_of(RingPosition at) { return at >> 4; }

template <int kStages>
FUNC void advance(RingPosition& at, int uses = 1) {
  at += uses;
  if (stage_of(at) >= kStages) at = (at - kStages) ^ 16;
}

// Addresses of mbarriers: for each ring the full ones of all stages, then the empty ones.
constexpr u32 kBarriersQ = kSmemBarriers, kBarriersK = kBarriersQ + 16 * kQueryTiles;
constexpr u32 kBarriersV = kBarriersK + 16 * kStagesK, kBarriersTile = kBarriersV + 16 * kStagesV;
constexpr int kTileSlots = kDynamic ? 2 : 0;  // tile numbers on their way from the producer to the consumers
constexpr u32 kTileNumbers = kBarriersTile + 16 * kTileSlots;

template <int kStages>
FUNC u32 full_barrier(u32 barriers, int stage) {
  return smem_base() + barriers + 8 * stage;
}
template <int kStages>
FUNC u32 empty_barrier(u32 barriers, int stage) {
  return smem_base() + barriers + 8 * (kStages + stage);
}

template <int kStages>
FUNC void init_ring(u32 barriers, int consumers) {
#pragma unroll
  for (int stage = 0; stage < kStages; stage++) {
    mbarrier_init(full_barrier<kStages>(barriers, stage), 1);
    mbarrier_init(empty_barrier<kStages>(barriers, stage), consumers);
  }
}

template <int kStages>
FUNC void wait_full(u32 barriers, RingPosition at) {
  mbarrier_try_wait(full_barrier<kStages>(barriers, stage_of(at)), phase_of(at));
}
// A fresh stage is empty: the phase before the first counts as complete.
template <int kStages>
FUNC void wait_empty(u32 barriers, RingPosition at) {
  mbarrier_try_wait(empty_barrier<kStages>(barriers, stage_of(at)), phase_of(at) ^ 1);
}

// This warp is done with a stage.
template <int kStages>
FUNC void release(u32 barriers, RingPosition at) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_barrier<kStages>(barriers, stage_of(at)));
}

// One thread issues a warpgroup's stores and waits for them, so it speaks for the warpgroup.
FUNC bool is_group_leader() { return threadIdx.x % 128 == 0; }
