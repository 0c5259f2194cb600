// Copies of boxes between tensors and shared memory.
#include "block.h"

namespace emulator {

namespace {

Box box_of(const void* map, const int (&at)[4], unsigned address, const char* what) {
  return {TensorMapView::read(map, what), {at[0], at[1], at[2], at[3]}, address};
}

}  // namespace

// The block has used TMA, wgmma or a fence for them.
void Block::begin_async() {
  if (has_async_) return;
  has_async_ = true;
  threads_ordered_ = true;
  shared.start_async();
}

void Block::check_box(const Box& box, const char* what) const {
  if (box.address % 128)
    throw Diagnostic("shared-misaligned",
                     format("%s at %s, which is not a multiple of 128 bytes", what, shared.place(box.address).c_str()));
  shared.check_inside(box.address, box.map.bytes(), what);
}

void Block::tma_load(unsigned dst, const void* map, unsigned mbarrier, const int (&at)[4]) {
  begin_async();
  counters.tma_load++;
  InFlightLoad flight;
  BulkLoad& load = flight.load;
  load.box = box_of(map, at, dst, "tma_load");
  check_box(load.box, "tma_load");
  const unsigned bytes = load.box.map.bytes();
  load.mbarrier = mbarriers_.find(mbarrier, accessor(), "tma_load");
  Mbarrier& m = mbarriers_[load.mbarrier];
  mbarriers_.begin_bytes(m, bytes, accessor());
  load.tid = current->tid, load.site = current->site;
  load.agent = m.agent, load.phase = m.phase + 1;
  load.box.rows_inside([&](unsigned, const uint8_t* global, unsigned, unsigned size) {
    this->global.check_read(global, size, 2, "tma_load reads", recent_buffer);
  });
  flight.number = shared.begin_load(load, accessor());
  loads_.push_back(flight);
}

// The bytes arrive: only now is the tensor read and shared memory written.
void Block::land_load(size_t i) {
  const InFlightLoad flight = loads_[i];
  loads_[i] = loads_.back();
  loads_.pop_back();
  const Box& box = flight.load.box;
  const unsigned row_bytes = box.map.row_bytes();
  std::memset(shared.at(box.address), 0, box.map.bytes());
  box.rows_inside([&](unsigned row, const uint8_t* from, unsigned first, unsigned size) {
    const unsigned begin = box.address + row * row_bytes;
    for (unsigned byte = first; byte < first + size;) {
      const unsigned piece = std::min(first + size - byte, kChunkBytes - byte % kChunkBytes);
      const unsigned chunk = swizzled(begin + byte / kChunkBytes * kChunkBytes, box.map.swizzle);
      std::memcpy(shared.at(chunk) + byte % kChunkBytes, from + (byte - first), piece);
      byte += piece;
    }
  });
  shared.land_load(flight.number);
  Mbarrier& m = mbarriers_[flight.load.mbarrier];
  if (mbarriers_.end_bytes(m, box.map.bytes())) wake_waiters(m);
}

Block::StoreQueue& Block::store_queue() {
  for (StoreQueue& queue : store_queues_)
    if (queue.tid == current->tid) return queue;
  store_queues_.push_back({current->tid, agents_.add(), 0, 0, {}});
  return store_queues_.back();
}

void Block::tma_store(const void* map, unsigned src, const int (&at)[4]) {
  begin_async();
  counters.tma_store++;
  // An H200 takes such a store for an illegal instruction, though it loads from there.
  for (int coordinate : at)
    if (coordinate < 0)
      throw Diagnostic("tma-store-before-tensor",
                       format("tma_store of a box at column %d, row %d, head %d, batch %d: a store cannot begin before "
                              "the tensor",
                              at[0], at[1], at[2], at[3]));
  const Box box = box_of(map, at, src, "tma_store");
  check_box(box, "tma_store");
  StoreQueue& queue = store_queue();
  AsyncNeeds needs;
  const unsigned reader = options.checks ? shared.async().store_reader() : 0;
  for (unsigned byte = 0; byte < box.map.bytes(); byte += kChunkBytes)
    shared.read_async(src + byte, reader, queue.agent, queue.committed + 1, accessor(), "tma_store", current->site,
                      needs);
  if (options.checks) shared.check_needs(needs, accessor(), "tma_store");
  box.rows_inside([&](unsigned, uint8_t* to, unsigned, unsigned size) {
    global.check_write(to, size, 2, false, block_number, "tma_store writes", recent_buffer);
  });
  queue.stores.push_back({box, queue.committed, current->site});
}

void Block::tma_store_commit() {
  begin_async();
  store_queue().committed++;
}

// The stores of the groups that this covers read shared memory now, as late as they may.
void Block::tma_store_wait_read(unsigned pending) {
  begin_async();
  StoreQueue& queue = store_queue();
  if (queue.committed < pending || queue.committed - pending <= queue.waited) return;
  queue.waited = queue.committed - pending;
  size_t done = 0;
  for (; done < queue.stores.size() && queue.stores[done].group < queue.waited; done++) {
    const Box& box = queue.stores[done].box;
    box.rows_inside([&](unsigned row, uint8_t* to, unsigned first, unsigned size) {
      const unsigned begin = box.address + row * box.map.row_bytes();
      for (unsigned byte = first; byte < first + size;) {
        const unsigned piece = std::min(first + size - byte, kChunkBytes - byte % kChunkBytes);
        const unsigned chunk = swizzled(begin + byte / kChunkBytes * kChunkBytes, box.map.swizzle);
        std::memcpy(to + (byte - first), shared.at(chunk) + byte % kChunkBytes, piece);
        byte += piece;
      }
    });
  }
  queue.stores.erase(queue.stores.begin(), queue.stores.begin() + long(done));
  current->clock.known.raise(queue.agent, queue.waited);
}

void Block::fence_proxy_async() {
  begin_async();
  shared.fence_proxy(accessor());
  current->clock.ahead++;  // what follows is not fenced
}

void Block::fence_mbarrier_init() { mbarriers_.fence_init(accessor()); }

void Block::mbarrier_arrive_expect_tx(unsigned address, unsigned bytes) {
  mbarriers_.expect(mbarriers_[mbarriers_.find(address, accessor(), "mbarrier_arrive_expect_tx")], bytes);
  mbarrier_arrive(address, "mbarrier_arrive_expect_tx");
}

// A thread ends.
void Block::check_async_exit() const {
  for (const StoreQueue& queue : store_queues_)
    if (queue.tid == current->tid && !queue.stores.empty())
      throw Diagnostic("tma-store-left-at-exit",
                       format("the thread ends, but no tma_store_wait_read covers the tma_store at %s%s",
                              site_name(queue.stores[0].site).c_str(),
                              queue.stores[0].group == queue.committed ? ", which was never committed" : ""));
  const unsigned group = current->tid / kWarpgroupSize;
  if (group < warpgroups_.size() && warpgroups_[group]) warpgroups_[group]->check_exit(current->tid % kWarpgroupSize);
}

// The last thread has ended.
void Block::check_async_end() const {
  for (const auto& group : warpgroups_)
    if (group) group->check_end();
  if (registers_) registers_->check_end();
  for (const Mbarrier& m : mbarriers_.all())
    if (m.expected)
      throw Diagnostic("mbarrier-tx-count", format("the block ends: %s", mbarriers_.state(m).c_str()),
                       Diagnostic::kWholeBlock);
  for (const InFlightLoad& flight : loads_) throw unwaited(flight.load);
  if (!has_async_) return;
  // A copy may have landed before the end by chance only.
  for (size_t i = shared.async().loads.size(); i-- > 1;) {
    const BulkLoad& load = shared.async().loads[i];
    bool known = false;
    for (const Fiber& f : fibers_) known |= f.clock.known[load.agent] >= load.phase;
    if (!known) throw unwaited(load);
  }
}

Diagnostic Block::unwaited(const BulkLoad& load) const {
  return Diagnostic("tma-load-left-at-exit",
                    format("the block ends, but nobody has waited for the tma_load at %s, which arrives on %s",
                           site_name(load.site).c_str(), shared.place(mbarriers_.all()[load.mbarrier].address).c_str()),
                    int(load.tid));
}

}  // namespace emulator
