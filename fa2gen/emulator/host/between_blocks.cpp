// What a block does that other blocks see: additions of floats, and semaphores.
#include "block.h"

namespace emulator {

// One of the floats at `address`, which check_write has found in `recent_buffer`.
void Block::add(float* address, float value, const char* what) {
  const bool at_once = grid.semaphores.in_use();
  if (at_once) grid.additions.make_in_order(additions_);
  Adder before;
  bool ordered = true;
  {
    auto lock = grid.additions.lock(address);
    if (options.checks) {
      Adder& last = grid.additions.last_adder(recent_buffer, global.buffers[recent_buffer], address);
      before = last;
      last = {block_number + 1, current->tid, accessor().epoch(), current->site};
      if (at_once || !grid.additions.has_unordered()) ordered = is_ordered(before);
    }
    if (at_once) *address += value;
  }
  if (!at_once) {
    additions_.push_back({address, value});
    if (additions_.size() > Additions::kMostHeld) grid.additions.make(additions_, random_);
  }
  if (ordered) return;
  const Diagnostic fault = unordered(before, address, what);
  if (at_once) throw fault;
  grid.additions.note_unordered(located(fault));
}

bool Block::is_ordered(const Adder& adder) {
  if (adder.block == 0) return true;
  if (adder.block - 1 == block_number) return adder.tid == current->tid || accessor().knows(adder.tid, adder.epoch);
  return waits_ && grid.semaphores.ordered(*waits_, current->clock.known, adder.block - 1, adder.tid, adder.epoch);
}

Diagnostic Block::unordered(const Adder& adder, const float* address, const char* what) const {
  const std::string text = format("%s on %s, to which block number %u thread %u (warp %u) at %s added", what,
                                  global.element(address).c_str(), adder.block - 1, adder.tid, adder.tid / kWarpSize,
                                  site_name(adder.site).c_str());
  const Release* release =
      waits_ ? Semaphores::left_out(*waits_, current->clock.known, adder.block - 1, adder.tid, adder.epoch) : nullptr;
  if (release)
    return Diagnostic("semaphore-release-without-sync",
                      text + format(": the release by thread %u at %s does not cover it, as no sync_warp or barrier is "
                                    "between the two",
                                    release->tid, site_name(release->site).c_str()));
  return Diagnostic("semaphore-unordered-sum",
                    text +
                        ": nothing orders the two in this launch with semaphores, so that the sum depends on the "
                        "schedule");
}

// The first use of a semaphore: from here on additions are made at once.
void Block::begin_semaphores() {
  if (!waits_) waits_ = grid.semaphores.begin_use();
  grid.additions.make_in_order(additions_);
  threads_ordered_ = true;
}

void Block::release_add(unsigned* address, unsigned value) {
  begin_semaphores();
  const Warp& mine = warp();
  grid.semaphores.release(address, value,
                          {block_number, current->tid, current->site,
                           std::vector<uint32_t>(mine.clock, mine.clock + num_warps_), current->clock, waits_});
  current->clock.ahead++;
}

void Block::wait_until_equal(const unsigned* address, unsigned value) {
  begin_semaphores();
  current->semaphore = address, current->wanted = value;
  if (acquires(*current)) return;
  current->waits = Operation::kWaitUntilEqual;
  waiting_.push_back(current->tid);
  switch_to(next());
}

// Acquires what brought the semaphore to the value that is returned: what it is now or, as a load may come early, what
// it was a release before.
unsigned Block::look(const unsigned* address) {
  begin_semaphores();
  return grid.semaphores.look(address, random_ >> 40 & 1, *waits_, current->tid, current->clock.known);
}

void Block::open_tickets(unsigned long long* address) {
  global.check_tickets(address, "open_tickets on", recent_buffer);
  grid.tickets.open(address, block_number, current->site, global.element(address));
  grid.semaphores.changed();
}

unsigned Block::draw_ticket(unsigned long long* address, unsigned last) {
  global.check_tickets(address, "draw_ticket from", recent_buffer);
  const std::string name = global.element(address);
  for (;;) {
    unsigned number = 0, opener = 0;
    if (grid.tickets.draw(address, last, number, opener, name) == Tickets::Drawn::kNumber) {
      if (opener > block_number)
        throw Diagnostic("deadlock",
                         format("%s was opened by block number %u, but this is number %u: blocks start in ascending "
                                "order, so one may wait for ever for a later one",
                                name.c_str(), opener, block_number));
      return number;
    }
    current->tickets = address;
    waiting_.push_back(current->tid);
    sleep(Operation::kDrawTicket);
  }
}

// Has the semaphore that a thread waits for the value? Or: are the tickets open?
bool Block::acquires(Fiber& fiber) {
  if (fiber.waits == Operation::kDrawTicket) return grid.tickets.is_open(fiber.tickets);
  unsigned latest = 0;
  if (!grid.semaphores.acquire(fiber.semaphore, fiber.wanted, *waits_, fiber.tid, fiber.clock.known, &latest))
    return false;
  if (latest > block_number)
    throw Diagnostic("deadlock",
                     format("%s became %u by the release of block number %u, but this is number %u: blocks start in "
                            "ascending order, so one may wait for ever for a later one",
                            global.element(fiber.semaphore).c_str(), fiber.wanted, latest, block_number),
                     int(fiber.tid));
  return true;
}

// Those who have what they wait for may run.
void Block::look_at_semaphores() {
  for (size_t i = 0; i < waiting_.size();) {
    Fiber& fiber = fibers_[waiting_[i]];
    if (!acquires(fiber)) {
      i++;
      continue;
    }
    fiber.waits = Operation::kNone;
    ready_[num_ready_++] = fiber.tid;
    waiting_[i] = waiting_.back();
    waiting_.pop_back();
  }
}

// No thread of this block can run before another block releases a semaphore.
void Block::sleep_until_release() {
  const uint64_t version = grid.semaphores.version();
  look_at_semaphores();
  if (num_ready_) return;
  switch (grid.semaphores.sleep(version)) {
    case Semaphores::Wake::kChanged:
      return;
    case Semaphores::Wake::kDeadlock:
      throw deadlock();
    case Semaphores::Wake::kStopped:
      throw Diagnostic("", "given up, as another block has failed", Diagnostic::kWholeBlock);
  }
}

}  // namespace emulator
