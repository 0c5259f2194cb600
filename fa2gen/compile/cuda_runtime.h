// Stands in for the toolkit's cuda_runtime.h, which nvcc includes ahead of every source whether it asks or not. Kernel
// text needs nothing of it but the language's keywords and built-in variables, and parsing the real one takes a quarter
// of a kernel's compile time (0.5 of 2.0 CPU seconds). The cubin is the same, byte for byte.
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __grid_constant__ __attribute__((grid_constant))
#define __align__(n) __attribute__((aligned(n)))

struct __attribute__((device_builtin)) uint3 {
  unsigned int x, y, z;
};
struct __attribute__((device_builtin)) dim3 {
  unsigned int x, y, z;
};
uint3 __attribute__((device_builtin)) extern const threadIdx;
uint3 __attribute__((device_builtin)) extern const blockIdx;
dim3 __attribute__((device_builtin)) extern const blockDim;
dim3 __attribute__((device_builtin)) extern const gridDim;
int __attribute__((device_builtin)) extern const warpSize;
