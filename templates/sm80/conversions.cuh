// Two 16-bit elements as floats, exactly: the low half, and the high half.
template <class Element>
FUNC float unpack_low(u32 pair);
template <>
FUNC float unpack_low<bf16>(u32 pair) {
  return bits_as<float>(pair << 16);
}
template <>
FUNC float unpack_low<fp16>(u32 pair) {
  float y;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }" : "=f"(y) : "r"(pair));
  return y;
}
template <class Element>
FUNC float unpack_high(u32 pair);
template <>
FUNC float unpack_high<bf16>(u32 pair) {
  return bits_as<float>(pair & 0xffff0000u);
}
template <>
FUNC float unpack_high<fp16>(u32 pair) {
  float y;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi; }" : "=f"(y) : "r"(pair));
  return y;
}

// A value that all lanes of a warp have, as the compiler then knows: it keeps one for the warp, not one for each lane.
FUNC int uniform(int x) {
  int y;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
