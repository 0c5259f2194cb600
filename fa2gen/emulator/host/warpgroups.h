// Warpgroups: wgmma and the registers of their warps.
//
// A wgmma is one operation of 128 threads, but none of them waits for the others: each goes through its own text, and
// what it does is compared with what the warpgroup's first thread to come there did. The product begins to read as the
// first thread issues it, and is complete in group order once a wait covers it and all threads have committed it.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "async_shadow.h"
#include "diagnostic.h"
#include "runtime_sm90.h"
#include "wgmma_product.h"

namespace emulator {

class Block;

// Products that add to one accumulator, from the first of them to the wait that hands the result out.
struct ProductChain {
  unsigned n = 0;
  float* registers[kWarpgroupSize];
  uint16_t issued[kWarpgroupSize], completed[kWarpgroupSize];  // products, by thread
  unsigned handed_out = 0;                                     // threads
  std::unique_ptr<float[]> c{new float[kWgmmaM * kWgmmaMostN]};
};

struct Wgmma {
  WgmmaIssue what;  // as its first thread gave it
  Site site;
  unsigned group;
  ProductChain* chain;
  bool begins_chain, executed = false;
  unsigned completed = 0;  // threads
  AsyncNeeds needs;
  const unsigned* a_registers[kWarpgroupSize];
  unsigned a_values[kWarpgroupSize][4];  // as they were issued
};

// One warpgroup's part in the above.
class Warpgroup {
 public:
  Warpgroup(Block& block, unsigned number, size_t agent);

  void fence(unsigned thread, Site site);
  void issue(unsigned thread, const WgmmaIssue& what, Site site);
  void commit(unsigned thread, Site site);
  void wait(unsigned thread, unsigned pending, Site site);
  void check_exit(unsigned thread) const;
  void check_end() const;
  // How many of the steps below a thread has made.
  uint32_t steps_of(unsigned thread) const { return steps_of_[thread]; }
  std::string waits_for(unsigned thread) const;

 private:
  enum class Kind : uint8_t { kFence, kIssue, kCommit, kWait };
  // What all threads do alike.
  struct Step {
    Kind kind;
    Site site;
    unsigned pending;
    Wgmma* product;
    unsigned made = 0;  // by so many threads
  };
  // Registers of a thread that products have used.
  struct Registers {
    const void* at;
    unsigned words;
    uint64_t contents = 0;  // a hash of what they held at the last wgmma_fence
    bool fenced = false;    // there has been one since they were used first
    bool handed_out = false;  // the result of a product has come since the last wgmma_fence
    bool in_flight = false;
  };
  struct Thread {
    bool fenced = false;  // since its start or its last wait
    unsigned committed = 0, waited = 0, uncommitted = 0;
    size_t completed = 0;  // products
    std::vector<Registers> registers;
  };
  struct Waiter {
    unsigned tid, target;
  };

  Step& step(unsigned thread, Kind kind, Site site, unsigned pending);
  void drop_steps();
  void begin(Wgmma& product);
  void read_operand(Wgmma& product, const OperandDescriptor& at, bool is_b);
  void join_chain(Wgmma& product, unsigned thread, float* d, bool first);
  void check_fence(Wgmma& product, unsigned thread, const WgmmaIssue& what);
  Registers* find(unsigned thread, const void* at, unsigned words);
  Registers& used(unsigned thread, const void* at, unsigned words);
  void execute(Wgmma& product);
  void complete(Wgmma& product, unsigned thread);
  void drop_products();
  ProductChain* new_chain();
  [[noreturn]] void differs(const Step& step, unsigned thread, const char* what, Site site) const;

  Block& block_;
  const unsigned number_;
  const size_t agent_;
  const bool checks_;
  Thread threads_[kWarpgroupSize];
  uint32_t steps_of_[kWarpgroupSize] = {};
  std::deque<Step> steps_;
  uint32_t first_step_ = 0;  // the number of steps_.front()
  std::deque<std::unique_ptr<Wgmma>> products_;
  size_t first_product_ = 0;
  std::vector<unsigned> commits_;  // [group]: threads that have committed it
  unsigned whole_groups_ = 0;      // that all have
  size_t executed_ = 0;            // products
  std::vector<Waiter> waiters_;
  std::vector<std::unique_ptr<ProductChain>> chains_, unused_chains_;
};

// How many registers the warps of a block have.
class RegisterBudget {
 public:
  explicit RegisterBudget(unsigned num_threads);
  void reset();
  // A warp asks for more, or gives back. It waits until it has what it asked for.
  void set(Block& block, unsigned warp, unsigned registers, bool increase, Site site);
  bool waits(unsigned warp) const;
  void check_end() const;
  std::string state() const;

 private:
  struct OfWarp {
    unsigned registers;
    unsigned wanted = 0;  // it waits for so many
    std::vector<Site> sites;
  };
  unsigned at_entry_, free_ = 0;
  std::vector<OfWarp> warps_;
};

}  // namespace emulator
