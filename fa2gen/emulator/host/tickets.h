// Numbers that blocks draw from words of global memory, each number once.
#pragma once
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "diagnostic.h"

namespace emulator {

class Tickets {
 public:
  enum class Drawn { kNumber, kNotOpen };

  void open(unsigned long long* address, unsigned block, Site site, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool fresh = words_.emplace(address, Word{block, site, name}).second;
    if (!fresh)
      throw Diagnostic("tickets-opened-twice",
                       format("open_tickets on %s, which block number %u opened at %s", name.c_str(),
                              words_.at(address).block, site_name(words_.at(address).site).c_str()));
    *address = kOpen;
  }
  // `opener` becomes the number of the block that opened the word.
  Drawn draw(unsigned long long* address, uint32_t last, uint32_t& number, unsigned& opener, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = words_.find(address);
    if (found == words_.end()) return Drawn::kNotOpen;
    Word& word = found->second;
    opener = word.block;
    if (word.closed)
      throw Diagnostic("tickets-closed",
                       format("draw_ticket from %s after its last number, %u, was drawn: it waits for "
                              "ever",
                              name.c_str(), word.next - 1));
    number = word.next++;
    word.closed = number == last;
    *address = word.closed ? 0 : kOpen + word.next;
    return Drawn::kNumber;
  }
  bool is_open(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return words_.count(address) > 0;
  }
  // The launch has ended.
  void finish() const {
    for (const auto& entry : words_)
      if (!entry.second.closed)
        throw Diagnostic("tickets-left-open",
                         format("%s, opened at %s, is open as the launch ends: %u numbers were drawn, the last one was "
                                "not; the next launch would draw from it before it is opened",
                                entry.second.name.c_str(), site_name(entry.second.site).c_str(), entry.second.next),
                         Diagnostic::kWholeBlock);
  }

 private:
  static constexpr unsigned long long kOpen = 0x7b1d2f5300000000ull;  // kTicketsOpen of the kernel's headers
  struct Word {
    unsigned block;
    Site site;
    std::string name;
    uint32_t next = 0;
    bool closed = false;
    Word(unsigned opener, Site where, const std::string& what) : block(opener), site(where), name(what) {}
  };

  std::mutex mutex_;
  std::unordered_map<const void*, Word> words_;
};

}  // namespace emulator
