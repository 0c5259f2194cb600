// A CUDA driver with two devices and no GPU: keeps each thread's context stack by the rules of the driver API, refuses a
// launch whose function belongs to another context, and records what it accepts. The symbols that PyCUDA links to and
// that have no body here are added by the test, each as a function that returns success.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define DEVICES 2
enum { INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };

static int contexts[DEVICES];  // their addresses are the handles
static __thread void* stack[64];
static __thread int depth;

struct module {
  void* context;
};
static struct module modules[256];
static int module_count;

// What the test reads and sets.
int fake_launches, fake_unloads, fake_fail_next, fake_dead, fake_dead_after;  // after so many launches, if not 0
void* fake_functions[64];
unsigned char fake_first_bytes[64];
void *fake_context, *fake_stream;
unsigned fake_grid[3], fake_block[3], fake_smem;
uint64_t fake_first_parameter;
int fake_attribute_value;
int fake_depth(void) { return depth; }

static int context_index(void* context) { return (int)((int*)context - contexts); }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = DEVICES, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetName(char* name, int size, int device) { return snprintf(name, size, "Fake %d", device), 0; }
int cuDeviceComputeCapability(int* major, int* minor, int device) { return *major = 8, *minor = 6, 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = 1ul << 30, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { return *value = attribute, 0; }

int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &contexts[device], 0; }
int cuCtxGetCurrent(void** context) { return *context = depth ? stack[depth - 1] : 0, 0; }
int cuCtxSetCurrent(void* context) {
  if (depth) depth--;
  if (context) stack[depth++] = context;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) { return stack[depth++] = context, 0; }
int cuCtxPopCurrent_v2(void** context) {
  if (!depth) return INVALID_CONTEXT;
  return *context = stack[--depth], 0;
}
int cuCtxGetDevice(int* device) {
  if (!depth) return INVALID_CONTEXT;
  return *device = context_index(stack[depth - 1]), 0;
}

int cuModuleLoadData(void** module, const void* image) {
  if (!depth) return INVALID_CONTEXT;
  if (memcmp(image, "\177ELF", 4)) return 200;
  modules[module_count].context = stack[depth - 1];
  return *module = &modules[module_count++], 0;
}
int cuModuleLoadDataEx(void** module, const void* image, unsigned n, void* options, void* values) {
  return cuModuleLoadData(module, image);
}
int cuModuleUnload(void* module) { return fake_unloads++, 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return *function = module, strcmp(name, "small") ? NOT_FOUND : 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) { return fake_attribute_value = value, 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t smem) {
  return *blocks = threads + (int)smem, 0;
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned smem, void* stream, void** parameters, void** extra) {
  if (fake_dead) return ILLEGAL_ADDRESS;
  if (!depth) return INVALID_CONTEXT;
  if (((struct module*)function)->context != stack[depth - 1]) return INVALID_HANDLE;
  if (fake_fail_next) {
    int status = fake_fail_next;
    return fake_fail_next = 0, status;
  }
  if (fake_launches < 64) {
    fake_functions[fake_launches] = function;
    fake_first_bytes[fake_launches] = *(unsigned char*)(parameters ? parameters[0] : extra[1]);
  }
  fake_launches++;
  if (fake_launches == fake_dead_after) fake_dead = 1;
  fake_context = stack[depth - 1], fake_stream = stream, fake_smem = smem;
  fake_grid[0] = gx, fake_grid[1] = gy, fake_grid[2] = gz;
  fake_block[0] = bx, fake_block[1] = by, fake_block[2] = bz;
  memcpy(&fake_first_parameter, parameters ? parameters[0] : extra[1], 8);
  return 0;
}

int cuGetErrorString(int status, const char** text) {
  switch (status) {
    case 1: *text = "invalid argument"; return 0;
    case INVALID_CONTEXT: *text = "invalid device context"; return 0;
    case 200: *text = "device kernel image is invalid"; return 0;
    case INVALID_HANDLE: *text = "invalid resource handle"; return 0;
    case NOT_FOUND: *text = "named symbol not found"; return 0;
    case ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; return 0;
  }
  *text = 0;
  return 1;
}
