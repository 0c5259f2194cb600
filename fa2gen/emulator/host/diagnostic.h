// Failures by name. The name is stable and tests rely on it; the text is for a person.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime.h"

namespace emulator {

// Thrown where the fault is found, which knows what is wrong; the fiber that catches it adds where in the kernel.
struct Diagnostic : std::runtime_error {
  static constexpr int kCurrentThread = -1, kWholeBlock = -2;
  std::string name;
  int tid;  // the thread at fault
  Diagnostic(std::string diagnostic_name, const std::string& text, int thread = kCurrentThread)
      : std::runtime_error(text), name(std::move(diagnostic_name)), tid(thread) {}
};

__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
  char text[1024];
  va_list args;
  va_start(args, pattern);
  vsnprintf(text, sizeof text, pattern, args);
  va_end(args);
  return text;
}

inline bool operator==(Site a, Site b) { return a.line == b.line; }
inline bool operator!=(Site a, Site b) { return a.line != b.line; }
inline std::string site_name(Site site) { return format("kernel.cpp:%u", site.line); }

}  // namespace emulator
