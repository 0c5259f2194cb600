// Enough of the driver for main.cpp to run without a GPU: memory is malloc's. A launch writes down what it was given,
// and by the variable STUB does nothing, computes attention or its gradients ("right"), or leaves out every last key
// ("drops a key"). With "no GPU", "other chip" and "small chip" it never comes to a launch. The parameter structs are
// those of main.cpp, put in front of what uses them; FORWARD, FORWARD_SM90 and BACKWARD say which there are. With
// FORWARD_SM90 it is a Hopper chip of five SMs, whose encoded tensor maps read as fa2gen's emulator reads them.
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
#ifdef FORWARD_SM90
  if (!stub_is("other chip")) {
    *value = a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 9
             : a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
             : a == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? 5
             : stub_is("small chip")                             ? 1024
                                                                 : 232448;
    return CUDA_SUCCESS;
  }
#endif
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
CUresult cuMemsetD8(CUdeviceptr d, unsigned char value, size_t n) { memset((void*)d, value, n); return CUDA_SUCCESS; }
// As on a device, memory is not cleared.
CUresult cuMemAlloc(CUdeviceptr* p, size_t n) { return cuMemsetD8(*p = (CUdeviceptr)malloc(n), 0xa5, n); }
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
#if defined FORWARD || defined FORWARD_SM90
// Tensors by address, elements from one batch, row and head to the next.
struct Tensor {
  CUdeviceptr address;
  int64_t batch, row, head;
};
struct Forward {
  struct Tensor q, k, v, o;
  CUdeviceptr lse;
  int num_batches, num_heads, seqlen_q, seqlen_k;
  float softmax_scale;
};
static int64_t place(struct Tensor t, int b, int i, int h) { return b * t.batch + i * t.row + h * t.head; }
static void attend(struct Forward p, const char* name, int dropped) {
  const int d = p.q.head, bf16 = !!strstr(name, "bf16"), gqa = atoi(strstr(name, "gqa") + 3);
  double *w = malloc(8 * p.seqlen_k), *o = malloc(8 * d);
  for (int b = 0; b < p.num_batches; b++) for (int h = 0; h < p.num_heads; h++) for (int i = 0; i < p.seqlen_q; i++) {
    int visible = strstr(name, "causal") ? i + 1 + p.seqlen_k - p.seqlen_q : p.seqlen_k;
    visible = (visible < 0 ? 0 : visible) - (visible > dropped ? dropped : 0);
    double sum = 0;
    memset(o, 0, 8 * d);
    for (int j = 0; j < visible; j++) {
      double s = 0;
      for (int c = 0; c < d; c++)
        s += (double)load(p.q.address, place(p.q, b, i, h) + c, bf16) *
             load(p.k.address, place(p.k, b, j, h / gqa) + c, bf16);
      sum += w[j] = exp(s * p.softmax_scale);
      for (int c = 0; c < d; c++)
        o[c] += w[j] * load(p.v.address, place(p.v, b, j, h / gqa) + c, bf16);
    }
    for (int c = 0; c < d; c++)
      store(p.o.address, place(p.o, b, i, h) + c, bf16, visible ? o[c] / sum : 0);
    ((float*)p.lse)[(b * p.num_heads + h) * (int64_t)p.seqlen_q + i] = log(sum);
  }
  free(w), free(o);
}
#endif
#ifdef FORWARD
static struct Forward forward(struct FwdParams p) {
  return (struct Forward){{p.q, p.q_batch_stride, p.q_row_stride, p.q_head_stride},
                          {p.k, p.k_batch_stride, p.k_row_stride, p.k_head_stride},
                          {p.v, p.v_batch_stride, p.v_row_stride, p.v_head_stride},
                          {p.o, p.o_batch_stride, p.o_row_stride, p.o_head_stride},
                          p.softmax_lse, p.batch, p.num_heads, p.seqlen_q, p.seqlen_k, p.softmax_scale};
}
#endif
#ifdef FORWARD_SM90
// What TensorMap.emulated() of fa2gen packs.
struct Map {
  uint64_t address, strides[3];
  uint32_t sizes[4], box[4], swizzle_bytes;
};
CUresult cuTensorMapEncodeTiled(CUtensorMap* encoded, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  if (rank != 4 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || (uint64_t)address % 16 ||
      (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16))
    return CUDA_ERROR_INVALID_VALUE;
  struct Map map = {.address = (uint64_t)address, .swizzle_bytes = 128};
  for (int i = 0; i < 4; i++) {
    if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256 || element_strides[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (i < 3 && (strides[i] % 16 || strides[i] >= 1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
    map.sizes[i] = sizes[i], map.box[i] = box[i];
    if (i < 3) map.strides[i] = strides[i];
  }
  memset(encoded, 0, sizeof *encoded);
  memcpy(encoded, &map, sizeof map);
  return CUDA_SUCCESS;
}
static struct Tensor mapped(const CUtensorMap* encoded) {
  struct Map map;
  memcpy(&map, encoded, sizeof map);
  return (struct Tensor){map.address, map.strides[2] / 2, map.strides[0] / 2, map.strides[1] / 2};
}
static struct Forward forward_sm90(const struct FwdSm90Params* p, const char* name) {
  const struct Tensor o = {p->o, p->o_batch_stride, p->o_row_stride, p->o_head_stride};
  return (struct Forward){mapped(&p->q_map), mapped(&p->k_map), mapped(&p->v_map),
                          strstr(name, "_tma") ? mapped(&p->o_map) : o,
                          p->softmax_lse, p->batch, p->num_heads, p->seqlen_q, p->seqlen_k, p->softmax_scale};
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
  if (!strncmp(name, "fa2gen_fwd", 10) && strstr(name, "_sm80_")) {
    size = sizeof(struct FwdParams);
    if (stub) attend(forward(*(struct FwdParams*)arguments[0]), name, *stub == 'd');
  }
#endif
#ifdef FORWARD_SM90
  if (!strncmp(name, "fa2gen_fwd", 10) && strstr(name, "_sm90_")) {
    size = sizeof(struct FwdSm90Params);
    const CUdeviceptr tickets = ((struct FwdSm90Params*)arguments[0])->tickets;
    if (tickets && *(uint64_t*)tickets) return CUDA_ERROR_INVALID_VALUE;
    if (stub) attend(forward_sm90(arguments[0], name), name, *stub == 'd');
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
