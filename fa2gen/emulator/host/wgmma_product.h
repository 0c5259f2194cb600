// The product of a warpgroup, 64 x N (+)= 64 x 16 times 16 x N, in float32 in the order of k; and where its elements
// lie.
#pragma once
#include "numerics.h"
#include "tensor_map.h"

namespace emulator {

constexpr unsigned kWgmmaM = 64, kWgmmaK = 16, kWgmmaMostN = 256;

// A descriptor of an operand in shared memory, as the hardware reads it.
struct OperandDescriptor {
  unsigned start, leading_bytes, stride_bytes;
  unsigned row_bytes;    // 128, 64 or 32, those of the swizzle
  unsigned panel_shift;  // a panel's row has 1 << panel_shift chunks

  static OperandDescriptor decode(unsigned long long bits, const char* which) {
    const unsigned mode = unsigned(bits >> 62), base_offset = unsigned(bits >> 49 & 7);
    const unsigned long long used = 0xc00e3fff3fff3fffull;
    if (mode == 0 || base_offset || bits & ~used)
      throw Diagnostic(
          "wgmma-descriptor",
          format("the descriptor of %s is 0x%016llx: its layout is %u, of which 1, 2 and 3 are swizzled ones, "
                 "its base offset is %u, which must be 0, and unused bits are 0x%llx",
                 which, bits, mode, base_offset, bits & ~used));
    return {unsigned(bits & 0x3fff) << 4, unsigned(bits >> 16 & 0x3fff) << 4, unsigned(bits >> 32 & 0x3fff) << 4,
            256u >> mode, 4 - mode};
  }
  // The address of a chunk of 8 elements. K-major: elements 8 `column` and on of row `row` along M or N.
  unsigned k_major(unsigned row, unsigned column) const {
    return swizzled(start + row / 8 * stride_bytes + row % 8 * row_bytes + 16 * column, row_bytes);
  }
  // MN-major: elements 8 `column` and on, along N, of row k.
  unsigned mn_major(unsigned k, unsigned column) const {
    const unsigned panel = column >> panel_shift, chunk = column & ((1u << panel_shift) - 1);
    return swizzled(start + panel * leading_bytes + k / 8 * stride_bytes + k % 8 * row_bytes + 16 * chunk, row_bytes);
  }
};

// c[64][n] += a[64][16] b[16][n], a multiplication and an addition rounded each.
void wgmma_product(float* c, const float* a, const float* b, unsigned n);

// Calls f(place in registers, place in rows of n) for each pair of columns that a thread has of d.
template <class Pair>
inline void each_pair_of_thread(unsigned thread, unsigned n, Pair pair) {
  const unsigned row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  for (unsigned i = 0; i < n / 8; i++) {
    pair(4 * i, row * n + 8 * i + column);
    pair(4 * i + 2, (row + 8) * n + 8 * i + column);
  }
}

}  // namespace emulator
