// Enough of the driver for main.cpp to run without a GPU: memory is malloc's. A launch writes down what it was given,
// and by the variable STUB does nothing, computes attention or its gradients ("right"), or leaves out every last key
// ("drops a key"). With "no GPU", "other chip" and "small chip" it never comes to a launch. The parameter structs are
// those of main.cpp, put in front of what uses them; FORWARD and BACKWARD say which there are.
#include <cuda.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct Function {
  char name[512];
  int max_smem;
};
static int stub_is(const char* name) { return getenv("STUB") && !strcmp(getenv("STUB"), name); }
CUresult cuInit(unsigned f) { return stub_is("no GPU") ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int n, CUdevice d) { snprintf(name, n, "Stub"); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute a, CUdevice d) {
  *value = a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 8
           : a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 9
           : stub_is("small chip")                             ? 1024
                                                               : 101376;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice d) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult r, const char** s) { *s = "stub"; return CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* p, size_t n) { *p = (CUdeviceptr)malloc(n); return CUDA_SUCCESS; }
CUresult cuMemFree(CUdeviceptr p) { free((void*)p); return CUDA_SUCCESS; }
CUresult cuMemcpyHtoD(CUdeviceptr d, const void* s, size_t n) { memcpy((void*)d, s, n); return CUDA_SUCCESS; }
CUresult cuMemcpyDtoH(void* d, CUdeviceptr s, size_t n) { memcpy(d, (void*)s, n); return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  *m = (CUmodule)1;
  return stub_is("other chip") ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  struct Function* function = calloc(1, sizeof *function);
  snprintf(function->name, sizeof function->name, "%s", name);
  *f = (CUfunction)function;
  return CUDA_SUCCESS;
}
static float load(CUdeviceptr p, int64_t i, int bf16) {
  if (!bf16) return (float)((_Float16*)p)[i];
  uint32_t u = (uint32_t)((uint16_t*)p)[i] << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}
static void store(CUdeviceptr p, int64_t i, int bf16, float x) {
  if (!bf16) { ((_Float16*)p)[i] = (_Float16)x; return; }
  uint32_t u;
  memcpy(&u, &x, 4);
  ((uint16_t*)p)[i] = (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
#ifdef FORWARD
static void attend(struct FwdParams p, int bf16, int gqa, int dropped) {
  const int d = p.q_head_stride;
  double *w = malloc(8 * p.seqlen_k), *o = malloc(8 * d);
  for (int b = 0; b < p.batch; b++) for (int h = 0; h < p.num_heads; h++) for (int i = 0; i < p.seqlen_q; i++) {
    int visible = i + 1 + p.seqlen_k - p.seqlen_q;
    visible = (visible < 0 ? 0 : visible) - (visible > dropped ? dropped : 0);
    double sum = 0;
    memset(o, 0, 8 * d);
    for (int j = 0; j < visible; j++) {
      double s = 0;
      for (int c = 0; c < d; c++)
        s += (double)load(p.q, b * p.q_batch_stride + i * p.q_row_stride + h * p.q_head_stride + c, bf16) *
             load(p.k, b * p.k_batch_stride + j * p.k_row_stride + h / gqa * p.k_head_stride + c, bf16);
      sum += w[j] = exp(s * p.softmax_scale);
      for (int c = 0; c < d; c++)
        o[c] += w[j] * load(p.v, b * p.v_batch_stride + j * p.v_row_stride + h / gqa * p.v_head_stride + c, bf16);
    }
    for (int c = 0; c < d; c++)
      store(p.o, b * p.o_batch_stride + i * p.o_row_stride + h * p.o_head_stride + c, bf16, visible ? o[c] / sum : 0);
    ((float*)p.softmax_lse)[(b * p.num_heads + h) * (int64_t)p.seqlen_q + i] = log(sum);
  }
  free(w), free(o);
}
#endif
#ifdef BACKWARD
// The three kernels of a backward: the first two leave their parameters to the third, which has the results' addresses.
static struct BwdPreprocessParams first;
static struct BwdParams second;
static char second_name[512];
static int64_t at_q(int b, int i, int h) {
  return b * second.q_batch_stride + i * second.q_row_stride + h * second.q_head_stride;
}
static int64_t at_k(int b, int j, int h) {
  return b * second.k_batch_stride + j * second.k_row_stride + h * second.k_head_stride;
}
static void store_all(CUdeviceptr p, const double* x, int64_t count, int bf16) {
  for (int64_t i = 0; i < count; i++) store(p, i, bf16, x[i]);
}
// Contiguous gradients, each element of which is written.
static void differentiate(struct BwdPostprocessParams p, int dropped) {
  const int d = second.q_head_stride, bf16 = !!strstr(second_name, "bf16"), gqa = atoi(strstr(second_name, "gqa") + 3);
  const int64_t count_q = second.batch * second.q_batch_stride, count_k = second.batch * second.k_batch_stride;
  double *dq = calloc(count_q, 8), *dk = calloc(count_k, 8), *dv = calloc(count_k, 8);
  for (int b = 0; b < second.batch; b++) for (int h = 0; h < second.num_heads; h++) for (int i = 0; i < p.seqlen_q; i++) {
    int visible = strstr(second_name, "causal") ? i + 1 + p.seqlen_k - p.seqlen_q : p.seqlen_k;
    visible = (visible < 0 ? 0 : visible) - (visible > dropped ? dropped : 0);
    const float lse = ((float*)first.lse)[(b * second.num_heads + h) * (int64_t)p.seqlen_q + i];
    const int64_t q = at_q(b, i, h);
    double delta = 0;
    for (int c = 0; c < d; c++) delta += (double)load(first.o, q + c, bf16) * load(first.dout, q + c, bf16);
    for (int j = 0; j < visible; j++) {
      const int64_t k = at_k(b, j, h / gqa);
      double s = 0, dp = 0;
      for (int c = 0; c < d; c++) {
        s += (double)load(second.q, q + c, bf16) * load(second.k, k + c, bf16);
        dp += (double)load(second.dout, q + c, bf16) * load(second.v, k + c, bf16);
      }
      const double w = exp(s * second.softmax_scale - lse), ds = p.softmax_scale * w * (dp - delta);
      for (int c = 0; c < d; c++) {
        dv[k + c] += w * load(second.dout, q + c, bf16);
        dk[k + c] += ds * load(second.q, q + c, bf16);
        dq[q + c] += ds * load(second.k, k + c, bf16);
      }
    }
  }
  store_all(p.dq, dq, count_q, bf16), store_all(second.dk, dk, count_k, bf16), store_all(second.dv, dv, count_k, bf16);
  free(dq), free(dk), free(dv);
}
#endif
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  ((struct Function*)f)->max_smem = v;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned smem, CUstream s, void** arguments, void** extra) {
  const char *stub = getenv("STUB"), *name = ((struct Function*)f)->name;
  const int max_smem = ((struct Function*)f)->max_smem;
  int size = 0;
#ifdef FORWARD
  if (!strncmp(name, "fa2gen_fwd", 10)) {
    size = sizeof(struct FwdParams);
    if (stub) attend(*(struct FwdParams*)arguments[0], !!strstr(name, "bf16"), atoi(strstr(name, "gqa") + 3), *stub == 'd');
  }
#endif
#ifdef BACKWARD
  if (!strncmp(name, "fa2gen_bwd_preprocess", 21)) {
    size = sizeof first;
    memcpy(&first, arguments[0], size);
  } else if (!strncmp(name, "fa2gen_bwd_postprocess", 22)) {
    size = sizeof(struct BwdPostprocessParams);
    if (stub) differentiate(*(struct BwdPostprocessParams*)arguments[0], *stub == 'd');
  } else if (!strncmp(name, "fa2gen_bwd", 10)) {
    size = sizeof second;
    memcpy(&second, arguments[0], size);
    snprintf(second_name, sizeof second_name, "%s", name);
  }
#endif
  FILE* file = fopen("launches.txt", "a");
  fprintf(file, "%s %u %u %u %u %u %u %u %d ", name, gx, gy, gz, bx, by, bz, smem, max_smem);
  for (int i = 0; i < size; i++) fprintf(file, "%02x", ((unsigned char*)arguments[0])[i]);
  fprintf(file, "\n");
  fclose(file);
  return CUDA_SUCCESS;
}
