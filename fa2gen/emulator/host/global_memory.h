// Global memory: a kernel may touch the registered buffers only, and of these only the elements that are in view. Flags
// are kept for every 2 bytes, the smallest element.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "diagnostic.h"

namespace emulator {

class GlobalBuffer {
 public:
  enum Flag : uint8_t { kInView = 1, kInitialised = 2, kAtomic = 4, kRead = 8 };

  std::string name;
  int pointer_index = 0;  // which 8-byte word of the parameters points here; -1: none
  int map_index = 0;      // and at which begins a tensor map that shows it
  uint64_t start = 0;  // at which byte
  bool writable = false, output = false;
  bool keeps_state = false;  // which elements are initialised is known from earlier launches, and told to later ones
  uint8_t* data = nullptr;
  size_t bytes = 0;
  std::vector<uint8_t> flags;
  std::vector<uint32_t> writer;  // 1 + number of the block that wrote it; writable buffers only

  // All bytes start as NaN in every 16-bit and 32-bit format; the caller fills in what is in view.
  void allocate(size_t size) {
    bytes = size;
    const size_t used = (size + kPage - 1) / kPage * kPage;
    void* reserved = mmap(nullptr, used + 2 * kGap, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) throw Diagnostic("out-of-memory", format("no memory for %s", name.c_str()));
    mapping_ = {static_cast<uint8_t*>(reserved), Unmap{used + 2 * kGap}};
    data = mapping_.get() + kGap;
    if (used && mprotect(data, used, PROT_READ | PROT_WRITE) != 0)
      throw Diagnostic("out-of-memory", format("no memory for %s", name.c_str()));
    std::memset(data, 0xff, size);
    flags.assign((size + 1) / 2, 0);
    if (writable) writer.assign((size + 1) / 2, 0);
  }
  bool contains(const uint8_t* at) const { return at >= data && at < data + bytes; }

 private:
  // Nothing is mapped this far around a buffer: an address that misses one by less does not hit another.
  static constexpr size_t kGap = size_t(1) << 30, kPage = 64 * 1024;
  struct Unmap {
    size_t bytes;
    void operator()(uint8_t* at) const { munmap(at, bytes); }
  };
  std::unique_ptr<uint8_t, Unmap> mapping_;
};

class GlobalMemory {
 public:
  std::vector<GlobalBuffer> buffers;

  // `recent` is the caller's memory of the buffer that it used last: with few buffers, finding one costs a compare.
  void check_read(const void* address, size_t bytes, size_t alignment, const char* what, size_t& recent) {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    GlobalBuffer& buffer = find(at, bytes, alignment, what, recent);
    check_flags(buffer, at, bytes, what, GlobalBuffer::kInView | GlobalBuffer::kInitialised);
    if (!buffer.writable) return;
    const size_t offset = at - buffer.data;
    for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; i++)
      if (set_flags(buffer.flags[i], GlobalBuffer::kRead) & GlobalBuffer::kAtomic) throw sum_read(buffer, i, what);
  }
  // A read by which a thread waits for the atomics of others.
  void check_wait(const void* address, const char* what, size_t& recent) const {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    check_flags(find(at, 4, 4, what, recent), at, 4, what, GlobalBuffer::kInView | GlobalBuffer::kInitialised);
  }

  // A word of 8 bytes that blocks draw numbers from; it needs no value beforehand.
  void check_tickets(void* address, const char* what, size_t& recent) {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    GlobalBuffer& buffer = find(at, 8, 8, what, recent);
    if (!buffer.writable)
      throw Diagnostic("global-read-only", format("%s %s, which is an input", what, buffer.name.c_str()));
    check_flags(buffer, at, 8, what, GlobalBuffer::kInView);
    for (size_t i = 0; i < 4; i++)
      set_flags(buffer.flags[size_t(at - buffer.data) / 2 + i], GlobalBuffer::kInitialised);
  }

  // Each element is written once in a launch, or by atomics only, and then not read; an output's once in all launches.
  void check_write(void* address, size_t bytes, bool atomic, unsigned block, const char* what, size_t& recent) {
    check_write(address, bytes, bytes, atomic, block, what, recent);
  }
  void check_write(void* address, size_t bytes, size_t alignment, bool atomic, unsigned block, const char* what,
                   size_t& recent) {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    GlobalBuffer& buffer = find(at, bytes, alignment, what, recent);
    const size_t offset = at - buffer.data;
    if (!buffer.writable)
      throw Diagnostic("global-read-only", format("%s %zu bytes of %s at byte %zu, which is an input", what, bytes,
                                                  buffer.name.c_str(), offset));
    check_flags(buffer, at, bytes, what, GlobalBuffer::kInView | (atomic ? GlobalBuffer::kInitialised : 0));
    for (size_t i = offset / 2; i < (offset + bytes) / 2; i++) {
      const uint32_t writer = __atomic_load_n(&buffer.writer[i], __ATOMIC_ACQUIRE);
      const uint8_t flags =
          set_flags(buffer.flags[i], GlobalBuffer::kInitialised | (atomic ? GlobalBuffer::kAtomic : 0));
      if (writer && !(atomic && flags & GlobalBuffer::kAtomic))
        throw Diagnostic("global-two-writers", format("%s %s at byte %zu, which block number %u already wrote", what,
                                                      buffer.name.c_str(), 2 * i, writer - 1));
      if (!writer && buffer.output && flags & GlobalBuffer::kInitialised)
        throw Diagnostic("global-two-writers", format("%s %s at byte %zu, which an earlier launch already wrote", what,
                                                      buffer.name.c_str(), 2 * i));
      if (atomic && flags & GlobalBuffer::kRead) throw sum_read(buffer, i, what);
      __atomic_store_n(&buffer.writer[i], block + 1, __ATOMIC_RELEASE);
    }
  }

  // "semaphores[3]": an element of 4 bytes, for reports.
  std::string element(const void* address) const {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    for (const GlobalBuffer& b : buffers)
      if (b.contains(at)) return format("%s[%lld]", b.name.c_str(), (at - (b.data + b.start)) / 4ll);
    return "?";
  }

 private:
  GlobalBuffer& find(const uint8_t* at, size_t bytes, size_t alignment, const char* what, size_t& recent) {
    return const_cast<GlobalBuffer&>(static_cast<const GlobalMemory*>(this)->find(at, bytes, alignment, what, recent));
  }
  const GlobalBuffer& find(const uint8_t* at, size_t bytes, size_t alignment, const char* what, size_t& recent) const {
    if (reinterpret_cast<uintptr_t>(at) % alignment)
      throw Diagnostic("global-misaligned", format("%s %zu bytes %s, which is not aligned to %zu bytes", what, bytes,
                                                   place(at).c_str(), alignment));
    if (recent >= buffers.size() || !buffers[recent].contains(at))
      for (recent = 0; recent < buffers.size() && !buffers[recent].contains(at);) recent++;
    if (recent == buffers.size() || at + bytes > buffers[recent].data + buffers[recent].bytes)
      throw Diagnostic("global-out-of-range", format("%s %zu bytes %s", what, bytes, place(at).c_str()));
    return buffers[recent];
  }

  // What the flags were. Blocks of several OS threads set them.
  static uint8_t set_flags(uint8_t& flags, int more) {
    const uint8_t before = __atomic_load_n(&flags, __ATOMIC_RELAXED);
    return (before & more) == more ? before : __atomic_fetch_or(&flags, uint8_t(more), __ATOMIC_RELAXED);
  }

  static Diagnostic sum_read(const GlobalBuffer& buffer, size_t i, const char* what) {
    return Diagnostic("global-sum-read",
                      format("%s %s at byte %zu: it is read and added to in one launch, so what is read depends on the "
                             "schedule",
                             what, buffer.name.c_str(), 2 * i));
  }

  static void check_flags(const GlobalBuffer& buffer, const uint8_t* at, size_t bytes, const char* what, int need) {
    const size_t offset = at - buffer.data;
    for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; i++) {
      const int missing = need & ~buffer.flags[i];
      if (!missing) continue;
      if (missing & GlobalBuffer::kInView)
        throw Diagnostic("global-out-of-view", format("%s %zu bytes of %s at byte %zu, outside the tensor's rows", what,
                                                      bytes, buffer.name.c_str(), offset));
      throw Diagnostic("global-uninitialised-read", format("%s %zu bytes of %s at byte %zu, which nobody wrote", what,
                                                           bytes, buffer.name.c_str(), offset));
    }
  }

  std::string place(const uint8_t* at) const {
    const GlobalBuffer* nearest = nullptr;
    long long least = 0;
    for (const GlobalBuffer& b : buffers) {
      if (b.contains(at)) return format("at byte %zu of %s (%zu bytes)", size_t(at - b.data), b.name.c_str(), b.bytes);
      const long long distance = at < b.data ? b.data - at : at - (b.data + b.bytes);
      if (!nearest || distance < least) nearest = &b, least = distance;
    }
    if (!nearest) return "where no buffer is";
    return format("%lld bytes %s %s", least, at < nearest->data ? "before the start of" : "after the end of",
                  nearest->name.c_str());
  }
};

}  // namespace emulator
