// 16-bit conversions (round to nearest even) and the tensor core's product of one warp.
#pragma once
#include <cmath>
#include <cstring>

#include "runtime.h"

namespace emulator {

inline float bits_to_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned float_to_bits(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_float(unsigned half) { return bits_to_float(half << 16); }
inline unsigned float_to_bf16(float value) {
  const unsigned bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // the NaN that the hardware gives
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float fp16_to_float(unsigned half) {
  const unsigned sign = (half & 0x8000) << 16, rest = (half & 0x7fff) << 13;
  if ((half & 0x7c00) == 0x7c00) return bits_to_float(sign | 0x7f800000 | rest);
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));
}
inline unsigned float_to_fp16(float value) {
  const unsigned bits = float_to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  if (magnitude < 0x38800000)  // subnormal: adding 0.5 aligns the mantissa, and the addition rounds to nearest even
    return sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000);
  return sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline bool subnormal(float x) { return x != 0 && std::fabs(x) < 0x1p-126f; }
inline float flush(float x) { return subnormal(x) ? std::copysign(0.f, x) : x; }

// Operands in, results out, of one lane in a warp collective.
struct Lane {
  unsigned a[4], b[2];
  float c[4];
};

// c = a b + c for one warp, in float32: a 16x16, b 16x8, c 16x8, fragments as in the PTX manual. Straight-line
// unpacking and two 4-wide sums; computed fragment indices and 8-wide vectors were 3.7 times slower without AVX.
template <Element kElement>
inline void warp_mma(Lane* lanes) {
  typedef float Vec4 __attribute__((vector_size(16)));
  constexpr bool kBf16 = kElement == Element::kBf16;
  float a[16][16];
  alignas(16) float b[16][8], c[16][8];
  auto lo = [](unsigned pair) { return kBf16 ? bf16_to_float(pair & 0xffff) : fp16_to_float(pair & 0xffff); };
  auto hi = [](unsigned pair) { return kBf16 ? bf16_to_float(pair >> 16) : fp16_to_float(pair >> 16); };
  for (int l = 0; l < 32; l++) {
    const Lane& x = lanes[l];
    const int g = l / 4, t = l % 4 * 2;
    float *top = &a[g][t], *bottom = &a[g + 8][t];
    top[0] = lo(x.a[0]), top[1] = hi(x.a[0]), bottom[0] = lo(x.a[1]), bottom[1] = hi(x.a[1]);
    top[8] = lo(x.a[2]), top[9] = hi(x.a[2]), bottom[8] = lo(x.a[3]), bottom[9] = hi(x.a[3]);
    b[t][g] = lo(x.b[0]), b[t + 1][g] = hi(x.b[0]), b[t + 8][g] = lo(x.b[1]), b[t + 9][g] = hi(x.b[1]);
    c[g][t] = x.c[0], c[g][t + 1] = x.c[1], c[g + 8][t] = x.c[2], c[g + 8][t + 1] = x.c[3];
  }
  for (int row = 0; row < 16; row++) {
    Vec4 left, right;
    std::memcpy(&left, &c[row][0], 16), std::memcpy(&right, &c[row][4], 16);
    for (int k = 0; k < 16; k++) {
      Vec4 b_left, b_right;
      std::memcpy(&b_left, &b[k][0], 16), std::memcpy(&b_right, &b[k][4], 16);
      left += b_left * a[row][k], right += b_right * a[row][k];
    }
    std::memcpy(&c[row][0], &left, 16), std::memcpy(&c[row][4], &right, 16);
  }
  for (int l = 0; l < 32; l++) {
    const int g = l / 4, t = l % 4 * 2;
    lanes[l].c[0] = c[g][t], lanes[l].c[1] = c[g][t + 1], lanes[l].c[2] = c[g + 8][t], lanes[l].c[3] = c[g + 8][t + 1];
  }
}

}  // namespace emulator
