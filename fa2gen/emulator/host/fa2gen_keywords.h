// CUDA's keywords mean nothing on the host. Comes before all kernel text.
#pragma once
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
