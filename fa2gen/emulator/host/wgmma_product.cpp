// The inner loops of wgmma. With wider vectors where the machine has them; the results are the same.
#include "wgmma_product.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_WIDE_VECTORS
#endif

namespace emulator {

FOR_WIDE_VECTORS void wgmma_product(float* c, const float* a, const float* b, unsigned n) {
  typedef float Vector __attribute__((vector_size(32)));
  constexpr unsigned kRows = 4;
  for (unsigned row = 0; row < kWgmmaM; row += kRows) {
    for (unsigned column = 0; column < n; column += 16) {
      const bool two = column + 8 < n;
      Vector left[kRows], right[kRows];
      for (unsigned r = 0; r < kRows; r++) {
        const float* at = c + (row + r) * n + column;
        std::memcpy(&left[r], at, sizeof(Vector));
        std::memcpy(&right[r], two ? at + 8 : at, sizeof(Vector));
      }
      for (unsigned k = 0; k < kWgmmaK; k++) {
        const float* at = b + k * n + column;
        Vector b_left, b_right;
        std::memcpy(&b_left, at, sizeof(Vector)), std::memcpy(&b_right, two ? at + 8 : at, sizeof(Vector));
        for (unsigned r = 0; r < kRows; r++) {
          const float x = a[(row + r) * kWgmmaK + k];
          left[r] += b_left * x, right[r] += b_right * x;
        }
      }
      for (unsigned r = 0; r < kRows; r++) {
        float* at = c + (row + r) * n + column;
        std::memcpy(at, &left[r], sizeof(Vector));
        if (two) std::memcpy(at + 8, &right[r], sizeof(Vector));
      }
    }
  }
}

}  // namespace emulator
