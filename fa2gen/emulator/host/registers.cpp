// setmaxnreg: the registers that a block has at its start, passed on from warp to warp.
#include <algorithm>

#include "block.h"

namespace emulator {

namespace {

constexpr unsigned kOfMultiprocessor = 65536, kMostOfThread = 255, kLeast = 24, kMost = 256, kStep = 8;

}  // namespace

RegisterBudget::RegisterBudget(unsigned num_threads)
    : at_entry_(std::min(kMostOfThread, kOfMultiprocessor / num_threads) / kStep * kStep),
      warps_(num_threads / kWarpSize) {
  reset();
}

void RegisterBudget::reset() {
  free_ = 0;
  for (OfWarp& w : warps_) w = {at_entry_, 0, {}};
}

void RegisterBudget::set(Block& block, unsigned warp, unsigned registers, bool increase, Site site) {
  const char* what = increase ? "setmaxnreg_inc" : "setmaxnreg_dec";
  OfWarp& mine = warps_[warp];
  const unsigned first = warp / 4 * 4, call = unsigned(mine.sites.size());
  for (unsigned w = first; w < std::min<size_t>(first + 4, warps_.size()); w++)
    if (warps_[w].sites.size() > call && warps_[w].sites[call] != site)
      throw Diagnostic("warpgroup-divergence", format("%s, where warp %u of this warpgroup has executed that at %s",
                                                      what, w, site_name(warps_[w].sites[call]).c_str()));
  mine.sites.push_back(site);
  if (registers % kStep || registers < kLeast || registers > kMost)
    throw Diagnostic("setmaxnreg-budget", format("%s to %u; 24 to 256 are possible, multiples of 8", what, registers));
  if (increase ? registers < mine.registers : registers > mine.registers)
    throw Diagnostic("setmaxnreg-budget",
                     format("%s to %u of a warp with %u registers a thread", what, registers, mine.registers));
  const unsigned all = unsigned(warps_.size()) * at_entry_;
  // The other warps keep 24 each at least, and this warpgroup's have as many as this one.
  if (increase && 4 * registers + (warps_.size() - 4) * kLeast > all)
    throw Diagnostic(
        "setmaxnreg-budget",
        format("%s to %u, which four warps can never have beside the others: the block's %zu warps have %u "
               "registers a thread each at entry",
               what, registers, warps_.size(), at_entry_));
  if (increase) {
    mine.wanted = registers;
  } else {
    free_ += mine.registers - registers;
    mine.registers = registers;
  }
  for (unsigned w = 0; w < warps_.size(); w++) {
    OfWarp& other = warps_[w];
    if (!other.wanted || other.wanted - other.registers > free_) continue;
    free_ -= other.wanted - other.registers;
    other.registers = other.wanted, other.wanted = 0;
    if (w != warp) block.wake_warp(w);
  }
}

bool RegisterBudget::waits(unsigned warp) const { return warps_[warp].wanted > 0; }

void RegisterBudget::check_end() const {
  for (size_t w = 0; w < warps_.size(); w++) {
    const OfWarp& leader = warps_[w / 4 * 4];
    if (warps_[w].sites.size() == leader.sites.size()) continue;
    const bool less = warps_[w].sites.size() < leader.sites.size();
    const auto& sites = less ? leader.sites : warps_[w].sites;
    throw Diagnostic(
        "warpgroup-divergence",
        format("the block ends, but warp %zu has not executed the setmaxnreg at %s, as warp %zu has",
               less ? w : w / 4 * 4, site_name(sites[std::min(warps_[w].sites.size(), leader.sites.size())]).c_str(),
               less ? w / 4 * 4 : w),
        Diagnostic::kWholeBlock);
  }
}

std::string RegisterBudget::state() const {
  std::string text;
  for (size_t w = 0; w < warps_.size(); w++)
    if (warps_[w].wanted)
      text += format("\n  setmaxnreg_inc: warp %zu has %u registers a thread and waits for %u; %u are free", w,
                     warps_[w].registers, warps_[w].wanted, free_);
  return text;
}

void Block::setmaxnreg(unsigned registers, bool increase) {
  if (!registers_) registers_ = std::make_unique<RegisterBudget>(num_threads_);
  rendezvous(Operation::kSetmaxnreg, -1, 0, [&](Warp&) {
    registers_->set(*this, warp_index(), registers, increase, current->site);
    return !registers_->waits(warp_index());
  });
}

}  // namespace emulator
