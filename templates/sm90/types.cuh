// ---- How TMA sees a tensor: opaque, encoded by the driver (cuTensorMapEncodeTiled), read by the copy engine only

struct alignas(64) TensorMap {
  u64 words[16];
};
