// What a kernel compiled for the host calls: the emulator's runtime, built once and linked to every kernel.
// Includes nothing, so that compiling a kernel costs little more than its own text.
#pragma once

namespace emulator {

// A place in the kernel text: its line. Primitives take it as a defaulted argument, so kernel text carries no macro.
struct Site {
  unsigned line;
};
// A call, because g++ 12 takes the line of Site{__builtin_LINE()} from a template's declaration.
inline Site site_of(unsigned line) { return {line}; }

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// The position of the fiber that this OS thread is running. __thread rather than thread_local: a plain load, where
// thread_local costs a call to a wrapper.
extern __thread unsigned current_tid;
extern __thread Dim3 current_block_index, current_grid;

enum class Element { kBf16, kFp16 };
enum class Vote { kAny, kAll };
enum class BarrierKind { kSyncThreads, kBarSync, kBarArrive };

constexpr unsigned kSmemBase = 1024;  // shared addresses start here, so that 0 and small offsets are out of range

void name_shared(const char* name, unsigned address, unsigned bytes);
void trace(const char* name, int value);

// Memory: these check an access, then say where the bytes are on the host.
const void* read_shared(unsigned address, unsigned bytes, Site site);
void* write_shared(unsigned address, unsigned bytes, Site site);
const void* read_global(const void* address, unsigned bytes, Site site);
void* write_global(void* address, unsigned bytes, Site site);
void atomic_add(float* address, float value, Site site);
void atomic_add(unsigned* address, unsigned value, Site site);
void atomic_add4(float* address, const float (&values)[4], Site site);
void wait_until_equal(const unsigned* address, unsigned value, Site site);
unsigned look(const unsigned* address, Site site);
void release_add(unsigned* address, unsigned value, Site site);

void cp_async16(unsigned dst, const void* src, int valid_bytes, Site site);
void cp_async_commit();
void cp_async_wait(unsigned pending);

void barrier(BarrierKind kind, int id, int threads, Site site);
int block_threads();
void sync_warp(Site site);
bool sync_threads_or(bool predicate, Site site);
bool bar_sync_or(int id, int threads, bool predicate, Site site);

void mbarrier_init(unsigned address, int count, Site site);
void mbarrier_arrive(unsigned address, Site site);
void cp_async_mbarrier_arrive(unsigned address, Site site);
void mbarrier_wait(unsigned address, unsigned parity, Site site);

unsigned shfl_xor(unsigned value, int lane_mask, Site site);
int uniform(int value, Site site);
bool vote(Vote kind, bool predicate, Site site);
void ldmatrix_x4(unsigned* r, unsigned row_address, bool trans, Site site);
void mma_m16n8k16(Element element, bool init, float* d, const unsigned* a, unsigned b0, unsigned b1, Site site);

float ex2(float x);
float lg2(float x);
float rcp(float x);
float max_f32(float a, float b);
float min_f32(float a, float b);
unsigned pack2(Element element, float lo, float hi);
float to_float(Element element, unsigned bits);

}  // namespace emulator

// Defined by the kernel's own object: calls the kernel with the parameter struct whose bytes are given.
extern "C" const unsigned emulator_params_bytes;
extern "C" void emulator_call_kernel(const void* params);
