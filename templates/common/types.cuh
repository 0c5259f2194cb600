// ---- Types

#define FUNC __device__ __forceinline__

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// bfloat16: bits only. Arithmetic is done in float, after an explicit conversion.
struct bf16 {
  u16 bits;
};

// IEEE half precision: bits only. Arithmetic is done in float, after an explicit conversion.
struct fp16 {
  u16 bits;
};

// Vectors that move in one access.
struct alignas(8) u32x2 {
  u32 x, y;
};
struct alignas(16) u32x4 {
  u32 x, y, z, w;
};

// The bytes of a value as another type of the same size.
template <class To, class From>
FUNC To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "equal sizes");
  union {
    From from;
    To to;
  } both{from};
  return both.to;
}

// A global pointer with arithmetic but no dereference operator: memory is reached only through the functions below that
// take one, and the compiler enforces it. Size and layout are those of a raw pointer, which is what the host passes.
template <class T>
struct gptr {
  T* address;
  FUNC gptr operator+(i64 elements) const { return {address + elements}; }
  FUNC gptr plus_bytes(i64 bytes) const { return {reinterpret_cast<T*>(reinterpret_cast<u64>(address) + bytes)}; }
};
