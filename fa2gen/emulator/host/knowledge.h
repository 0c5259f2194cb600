// What a thread knows of agents: the newest epoch of each, absent ones 0. Lanes of a warp mostly know the same, so
// epochs are shared between those who do and copied when one of them learns more.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulator {

// A vector of epochs. Only the OS thread of its block changes it or counts its users; others may read it.
class SharedEpochs {
 public:
  SharedEpochs() = default;
  SharedEpochs(const SharedEpochs& other) : node_(other.node_) {
    if (node_) node_->users++;
  }
  SharedEpochs(SharedEpochs&& other) noexcept : node_(other.node_) { other.node_ = nullptr; }
  SharedEpochs& operator=(SharedEpochs other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~SharedEpochs() { clear(); }

  uint32_t operator[](size_t i) const { return node_ && i < node_->epochs.size() ? node_->epochs[i] : 0; }
  void clear() {
    if (node_ && --node_->users == 0) delete node_;
    node_ = nullptr;
  }
  void raise(size_t i, uint32_t epoch) {
    if (epoch <= (*this)[i]) return;
    std::vector<uint32_t>& epochs = own();
    if (i >= epochs.size()) epochs.resize(i + 1);
    epochs[i] = epoch;
  }
  void join(const SharedEpochs& other);
  // Only those from `first` on.
  void join_from(const SharedEpochs& other, size_t first) {
    if (!other.node_) return;
    for (size_t i = first; i < other.node_->epochs.size(); i++) raise(i, other.node_->epochs[i]);
  }

 private:
  struct Node {
    unsigned users;
    std::vector<uint32_t> epochs;
  };
  struct Join;
  struct Order {
    bool left_adds_nothing, right_adds_nothing;
  };

  static Order compare(const std::vector<uint32_t>& left, const std::vector<uint32_t>& right) {
    const size_t both = std::min(left.size(), right.size());
    uint32_t left_more = left.size() > both, right_more = right.size() > both;
    for (size_t i = 0; i < both; i++) left_more |= left[i] > right[i], right_more |= right[i] > left[i];
    return {left_more == 0, right_more == 0};
  }
  static void raise_all(std::vector<uint32_t>& epochs, const std::vector<uint32_t>& others) {
    if (others.size() > epochs.size()) epochs.resize(others.size());
    for (size_t i = 0; i < others.size(); i++) epochs[i] = std::max(epochs[i], others[i]);
  }
  // To be changed: of this user alone.
  std::vector<uint32_t>& own() {
    if (!node_) node_ = new Node{1, {}};
    if (node_->users > 1) {
      node_->users--;
      node_ = new Node{1, node_->epochs};
    }
    return node_->epochs;
  }

  Node* node_ = nullptr;
};

struct SharedEpochs::Join {
  SharedEpochs left, right, result;
};

inline void SharedEpochs::join(const SharedEpochs& other) {
  if (other.node_ == node_ || !other.node_) return;
  if (!node_) {
    *this = other;
    return;
  }
  static __thread Join* last;  // the lanes of a warp join the same one after the other
  if (last && last->left.node_ == node_ && last->right.node_ == other.node_) {
    *this = last->result;
    return;
  }
  const Order order = compare(node_->epochs, other.node_->epochs);
  if (order.right_adds_nothing) return;
  if (order.left_adds_nothing) {
    *this = other;
    return;
  }
  if (node_->users == 1) {
    raise_all(node_->epochs, other.node_->epochs);
    return;
  }
  SharedEpochs result;
  result.node_ = new Node{1, node_->epochs};
  raise_all(result.node_->epochs, other.node_->epochs);
  if (!last) last = new Join;
  *last = {*this, other, result};
  *this = std::move(result);
}

// The newest epoch known of each agent. With T threads, agents are the threads, T + t the asynchronous copies of thread
// t (epochs are their batches), and from 2 T on those that a block numbers as they appear (Agents).
// Of other blocks a thread knows what its block's threads have acquired by semaphores (semaphores.h): for each of these
// threads, by how many of its waits.
class Knowledge {
 public:
  uint32_t operator[](size_t agent) const { return epochs_[agent]; }
  void clear() { epochs_.clear(), waits_.clear(); }
  void raise(size_t agent, uint32_t epoch) { epochs_.raise(agent, epoch); }
  uint32_t waits(size_t waiter) const { return waits_[waiter]; }
  void raise_waits(size_t waiter, uint32_t count) { waits_.raise(waiter, count); }
  void join(const Knowledge& other) {
    epochs_.join(other.epochs_);
    waits_.join(other.waits_);
  }
  // Only epochs, of agents from `first` on.
  void join_epochs(const Knowledge& other, size_t first) { epochs_.join_from(other.epochs_, first); }

 private:
  SharedEpochs epochs_, waits_;
};

// Numbers for agents that are no threads: mbarriers (epochs are their phases completed), warpgroups (groups of wgmma
// that have read their operands), threads that store by TMA (groups that have read their source).
class Agents {
 public:
  explicit Agents(unsigned num_threads) : first_(2 * size_t(num_threads)) {}
  void reset() { count_ = 0; }
  size_t add() { return first_ + count_++; }

 private:
  size_t first_, count_ = 0;
};

}  // namespace emulator
