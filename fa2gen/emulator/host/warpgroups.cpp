// wgmma: what its threads do one by one, and what must be true of it.
#include "warpgroups.h"

#include "block.h"

namespace emulator {

namespace {

bool is_pending(const float& value, unsigned& bits) {
  std::memcpy(&bits, &value, 4);
  return bits == kPendingResult;
}

uint64_t hash_of(const void* at, unsigned words) {
  const unsigned char* bytes = static_cast<const unsigned char*>(at);
  uint64_t a = 0x9e3779b97f4a7c15ull, b = 0xbf58476d1ce4e5b9ull;
  for (unsigned i = 0; i + 4 <= words; i += 4) {
    uint64_t x, y;
    std::memcpy(&x, bytes + 4 * i, 8), std::memcpy(&y, bytes + 4 * i + 8, 8);
    a = (a ^ x) * 0x94d049bb133111ebull, b = (b ^ y) * 0xd6e8feb86659fd93ull;
  }
  return a ^ (b << 1 | b >> 63);
}

const char* const step_names[] = {"wgmma_fence", "wgmma", "wgmma_commit", "wgmma_wait"};

}  // namespace

Warpgroup::Warpgroup(Block& block, unsigned number, size_t agent)
    : block_(block), number_(number), agent_(agent), checks_(block.options.checks) {
  block.shared.async().agents.resize(std::max<size_t>(block.shared.async().agents.size(), number + 1));
  block.shared.async().agents[number] = agent;
}

void Warpgroup::differs(const Step& step, unsigned thread, const char* what, Site site) const {
  throw Diagnostic("warpgroup-divergence",
                   format("%s at %s is step %u of this thread's wgmmas, but others of warpgroup %u have %s at %s there",
                          what, site_name(site).c_str(), steps_of_[thread], number_, step_names[int(step.kind)],
                          site_name(step.site).c_str()));
}

// The thread's next step, which is the first thread's if it is not the first.
Warpgroup::Step& Warpgroup::step(unsigned thread, Kind kind, Site site, unsigned pending) {
  const uint32_t at = steps_of_[thread] - first_step_;
  if (at == steps_.size()) steps_.push_back({kind, site, pending, nullptr});
  Step& step = steps_[at];
  if (step.kind != kind || step.site != site || step.pending != pending)
    differs(step, thread, step_names[int(kind)], site);
  steps_of_[thread]++;
  step.made++;
  return step;
}

void Warpgroup::drop_steps() {
  while (!steps_.empty() && steps_.front().made == kWarpgroupSize) steps_.pop_front(), first_step_++;
}

Warpgroup::Registers* Warpgroup::find(unsigned thread, const void* at, unsigned words) {
  for (Registers& r : threads_[thread].registers)
    if (r.at == at && r.words == words) return &r;
  return nullptr;
}

Warpgroup::Registers& Warpgroup::used(unsigned thread, const void* at, unsigned words) {
  if (Registers* known = find(thread, at, words)) return *known;
  auto& all = threads_[thread].registers;
  constexpr size_t kMost = 64;
  if (all.size() == kMost) all.erase(all.begin());
  all.push_back({at, words});
  return all.back();
}

void Warpgroup::fence(unsigned thread, Site site) {
  step(thread, Kind::kFence, site, 0);
  Thread& t = threads_[thread];
  t.fenced = true;
  if (checks_)
    for (Registers& r : t.registers) {
      if (r.in_flight) continue;
      r.contents = hash_of(r.at, r.words);
      r.fenced = true, r.handed_out = false;
    }
  drop_steps();
}

// Has what the thread did to the registers of this product been followed by a wgmma_fence?
void Warpgroup::check_fence(Wgmma& product, unsigned thread, const WgmmaIssue& what) {
  Thread& t = threads_[thread];
  auto check = [&](const void* at, unsigned words, bool is_read, const char* which) {
    Registers* r = find(thread, at, words);
    const char* why = nullptr;
    if (!r || !r->fenced) {
      if (!t.fenced) why = "this thread has executed no wgmma_fence since it began or last waited";
    } else if (r->handed_out) {
      why = "no wgmma_fence has followed the wait that brought what they hold";
    } else if (is_read && hash_of(at, words) != r->contents) {
      why = "they have changed since the last wgmma_fence";
    }
    if (why)
      throw Diagnostic("wgmma-fence-missing", format("%s uses registers as %s, but %s", what.name(), which, why));
  };
  if (product.begins_chain) check(what.d, what.n / 2, what.accumulate, "its accumulators");
  if (what.a_in_registers) check(what.a_registers, 4, true, "its left operand");
}

void Warpgroup::issue(unsigned thread, const WgmmaIssue& what, Site site) {
  Step& step = this->step(thread, Kind::kIssue, site, what.n);
  const unsigned made = step.made;
  Thread& t = threads_[thread];
  if (made == 1) {
    products_.push_back(std::make_unique<Wgmma>());
    step.product = products_.back().get();
    Wgmma& product = *step.product;
    product.what = what, product.site = site, product.group = t.committed;
    join_chain(product, thread, what.d, true);
    begin(product);
    block_.counters.wgmma++;
  }
  Wgmma& product = *step.product;
  if (made > 1) {
    if (what.a != product.what.a || what.b != product.what.b || what.accumulate != product.what.accumulate)
      throw Diagnostic(
          "wgmma-descriptor",
          format("this thread's descriptors are 0x%016llx and 0x%016llx and accumulate is %d; others of "
                 "warpgroup %u have 0x%016llx, 0x%016llx and %d",
                 what.a, what.b, what.accumulate, number_, product.what.a, product.what.b, product.what.accumulate));
    join_chain(product, thread, what.d, false);
    if (checks_) block_.shared.check_needs(product.needs, block_.accessor(), what.name());
  }
  if (checks_) check_fence(product, thread, what);
  ProductChain& chain = *product.chain;
  if (product.begins_chain) {
    if (what.accumulate)
      each_pair_of_thread(thread, what.n,
                          [&](unsigned from, unsigned to) { std::memcpy(&chain.c[to], what.d + from, 8); });
    for (unsigned i = 0; i < what.n / 2; i++) std::memcpy(what.d + i, &kPendingResult, 4);
    if (checks_) used(thread, what.d, what.n / 2).in_flight = true;
  }
  chain.issued[thread]++;
  if (what.a_in_registers) {
    product.a_registers[thread] = what.a_registers;
    std::memcpy(product.a_values[thread], what.a_registers, 16);
    if (checks_) used(thread, what.a_registers, 4);
  }
  t.uncommitted++;
  if (made == kWarpgroupSize && !block_.options.lazy_wgmma) execute(product);
  drop_steps();
}

// Finds the accumulator of a product among those in flight.
void Warpgroup::join_chain(Wgmma& product, unsigned thread, float* d, bool first) {
  const unsigned n = product.what.n;
  ProductChain* mine = nullptr;
  for (const auto& chain : chains_) {
    if (chain->issued[thread] == 0) continue;  // this thread has not used it, or has its result
    float* begin = chain->registers[thread];
    if (begin == d && chain->n == n)
      mine = chain.get();
    else if (checks_ && begin < d + n / 2 && d < begin + chain->n / 2)
      throw Diagnostic(
          "wgmma-accumulator-touched",
          format("the accumulators of this wgmma are partly those of one in flight with %u columns", chain->n));
  }
  if (first) {
    product.begins_chain = !mine;
    if (!mine) {
      mine = new_chain();
      mine->n = n;
    }
    product.chain = mine;
  } else if (product.begins_chain ? mine != nullptr : mine != product.chain) {
    throw Diagnostic("warpgroup-divergence",
                     "this thread's accumulators are not those that other threads of the warpgroup add to");
  }
  product.chain->registers[thread] = d;
}

ProductChain* Warpgroup::new_chain() {
  if (unused_chains_.empty()) unused_chains_.push_back(std::make_unique<ProductChain>());
  chains_.push_back(std::move(unused_chains_.back()));
  unused_chains_.pop_back();
  ProductChain* chain = chains_.back().get();
  std::fill(chain->issued, chain->issued + kWarpgroupSize, uint16_t(0));
  std::fill(chain->completed, chain->completed + kWarpgroupSize, uint16_t(0));
  chain->handed_out = 0;
  return chain;
}

void Warpgroup::commit(unsigned thread, Site site) {
  step(thread, Kind::kCommit, site, 0);
  drop_steps();
  Thread& t = threads_[thread];
  t.uncommitted = 0;
  if (commits_.size() == t.committed) commits_.push_back(0);
  if (++commits_[t.committed++] < kWarpgroupSize) return;
  whole_groups_++;
  for (size_t i = 0; i < waiters_.size();) {
    if (waiters_[i].target > whole_groups_) {
      i++;
      continue;
    }
    block_.wake(waiters_[i].tid);
    waiters_[i] = waiters_.back();
    waiters_.pop_back();
  }
}

void Warpgroup::wait(unsigned thread, unsigned pending, Site site) {
  step(thread, Kind::kWait, site, pending);
  drop_steps();
  Thread& t = threads_[thread];
  if (checks_ && pending == 0 && t.uncommitted)
    throw Diagnostic(
        "wgmma-not-committed",
        format("%u wgmmas of this thread are in no group, as no wgmma_commit has followed them", t.uncommitted));
  t.fenced = false;
  if (t.committed < pending || t.committed - pending <= t.waited) return;
  const unsigned target = t.committed - pending;
  if (whole_groups_ < target) {
    waiters_.push_back({block_.current->tid, target});
    block_.sleep(Operation::kWgmmaWait);
  }
  for (; executed_ < first_product_ + products_.size(); executed_++) {
    Wgmma& product = *products_[executed_ - first_product_];
    if (product.group >= target) break;
    if (!product.executed) execute(product);
  }
  while (t.completed < first_product_ + products_.size()) {
    Wgmma& product = *products_[t.completed - first_product_];
    if (product.group >= target) break;
    complete(product, thread);
    t.completed++;
  }
  t.waited = target;
  block_.current->clock.known.raise(agent_, target);
  drop_products();
}

// A thread's part of a product is done. Its registers are as the product left them, or something was wrong.
void Warpgroup::complete(Wgmma& product, unsigned thread) {
  product.completed++;
  if (checks_ && product.what.a_in_registers &&
      std::memcmp(product.a_values[thread], product.a_registers[thread], 16) != 0)
    throw Diagnostic("wgmma-operand-changed",
                     format("registers that the wgmma_rs at %s reads have changed before it was waited for",
                            site_name(product.site).c_str()));
  ProductChain& chain = *product.chain;
  if (++chain.completed[thread] < chain.issued[thread]) return;
  float* d = chain.registers[thread];
  if (checks_) {
    for (unsigned i = 0; i < chain.n / 2; i++) {
      unsigned bits;
      if (!is_pending(d[i], bits))
        throw Diagnostic("wgmma-accumulator-touched",
                         format("d[%u] of the wgmma at %s has been written before it was waited for (0x%08x)", i,
                                site_name(product.site).c_str(), bits));
    }
    Registers& r = used(thread, d, chain.n / 2);
    r.in_flight = false, r.handed_out = true;
  }
  each_pair_of_thread(thread, chain.n, [&](unsigned to, unsigned from) { std::memcpy(d + to, &chain.c[from], 8); });
  chain.issued[thread] = chain.completed[thread] = 0;
  if (++chain.handed_out < kWarpgroupSize) return;
  for (auto& live : chains_)
    if (live.get() == &chain) {
      unused_chains_.push_back(std::move(live));
      live = std::move(chains_.back());
      chains_.pop_back();
      break;
    }
}

void Warpgroup::drop_products() {
  while (!products_.empty() && products_.front()->completed == kWarpgroupSize) products_.pop_front(), first_product_++;
}

void Warpgroup::check_exit(unsigned thread) const {
  const Thread& t = threads_[thread];
  if (!checks_) return;
  if (t.uncommitted)
    throw Diagnostic("wgmma-not-committed",
                     format("the thread ends with %u wgmmas that no wgmma_commit has followed", t.uncommitted));
  if (t.waited < t.committed)
    for (const auto& product : products_)
      if (product->group >= t.waited)
        throw Diagnostic("wgmma-left-at-exit",
                         format("the thread ends with wgmmas not waited for, the first issued at %s",
                                site_name(product->site).c_str()));
}

void Warpgroup::check_end() const {
  for (const Step& step : steps_)
    if (checks_ && step.made < kWarpgroupSize)
      throw Diagnostic(
          "warpgroup-divergence",
          format("the block ends, but only %u of the 128 threads of warpgroup %u have executed the %s at %s", step.made,
                 number_, step_names[int(step.kind)], site_name(step.site).c_str()),
          Diagnostic::kWholeBlock);
}

Warpgroup& Block::warpgroup() {
  begin_async();
  const unsigned number = current->tid / kWarpgroupSize;
  if (warpgroups_.empty()) warpgroups_.resize((num_threads_ + kWarpgroupSize - 1) / kWarpgroupSize);
  auto& group = warpgroups_[number];
  if (!group) {
    if ((number + 1) * kWarpgroupSize > num_threads_)
      throw Diagnostic("warpgroup-divergence", format("warpgroup %u of the block has fewer than four warps", number));
    group = std::make_unique<Warpgroup>(*this, number, agents_.add());
  }
  return *group;
}

// The lanes of a warp meet: none of them has skipped a wgmma.
void Block::check_converged() const {
  const unsigned first = warp_index() * kWarpSize;
  const auto& group = warpgroups_[first / kWarpgroupSize];
  if (!group || !options.checks) return;
  for (unsigned l = 1; l < kWarpSize; l++)
    if (group->steps_of((first + l) % kWarpgroupSize) != group->steps_of(first % kWarpgroupSize))
      throw Diagnostic(
          "warpgroup-divergence",
          format("lanes 0 and %u of this warp meet after a different number of wgmma_fence, wgmma, "
                 "wgmma_commit and wgmma_wait: %u and %u",
                 l, group->steps_of(first % kWarpgroupSize), group->steps_of((first + l) % kWarpgroupSize)));
}

std::string Warpgroup::waits_for(unsigned thread) const {
  for (const Waiter& w : waiters_)
    if (w.tid % kWarpgroupSize == thread)
      return format(" for group %u of warpgroup %u, which %u of 128 threads have committed", w.target - 1, number_,
                    commits_[w.target - 1]);
  return "";
}

}  // namespace emulator
