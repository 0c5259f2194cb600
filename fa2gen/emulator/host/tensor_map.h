// A tensor map as the emulator sees it: what fa2gen.tensor_map.TensorMap.emulated packs, 128 bytes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "diagnostic.h"

namespace emulator {

// The 16-byte chunks of a tile in shared memory change places within their 128 bytes: bits 7 and up of the address are
// added to bits 4 and up, as many as the rows of 128, 64 or 32 bytes have.
inline unsigned swizzled(unsigned address, unsigned row_bytes) {
  return address ^ (address >> 3 & (row_bytes == 128 ? 0x70u : row_bytes == 64 ? 0x30u : 0x10u));
}

// A tensor of 16-bit elements with axes column, row, head, batch, and the box that a copy moves.
struct TensorMapView {
  uint64_t address;
  uint64_t strides[3];  // bytes from one row, head and batch to the next
  uint32_t sizes[4], box[4], swizzle;

  static TensorMapView read(const void* map, const char* what) {
    TensorMapView view;
    std::memcpy(&view, map, sizeof view);
    if (reinterpret_cast<uintptr_t>(map) % 64)
      throw Diagnostic("tma-map", format("%s with a map that does not lie at a multiple of 64 bytes", what));
    const bool row =
        view.row_bytes() == view.swizzle && (view.swizzle == 128 || view.swizzle == 64 || view.swizzle == 32);
    bool fits = row && view.address % 16 == 0;
    for (int axis = 0; axis < 4; axis++) fits &= view.box[axis] >= 1 && view.box[axis] <= 256 && view.sizes[axis] >= 1;
    for (uint64_t stride : view.strides) fits &= stride % 16 == 0 && stride >> 40 == 0;
    if (!fits)
      throw Diagnostic(
          "tma-map",
          format("%s with a map that TMA refuses: sizes %u %u %u %u, strides %llu %llu %llu bytes, box %u %u "
                 "%u %u, swizzle of %u bytes, address %llu modulo 16",
                 what, view.sizes[0], view.sizes[1], view.sizes[2], view.sizes[3], (unsigned long long)view.strides[0],
                 (unsigned long long)view.strides[1], (unsigned long long)view.strides[2], view.box[0], view.box[1],
                 view.box[2], view.box[3], view.swizzle, (unsigned long long)(view.address % 16)));
    return view;
  }

  unsigned row_bytes() const { return 2 * box[0]; }
  unsigned rows() const { return box[1] * box[2] * box[3]; }
  unsigned bytes() const { return row_bytes() * rows(); }
};

// Where an element of 16 bits came from.
struct TensorPlace {
  int64_t column, row, head, batch;
};

// A box of a tensor and where it lies in shared memory.
struct Box {
  TensorMapView map;
  int at[4];
  unsigned address;

  // The place in the tensor of the first element of a row of the box.
  TensorPlace place(unsigned row) const {
    if (row < map.box[1]) return {at[0], at[1] + int64_t(row), at[2], at[3]};
    return {at[0], at[1] + int64_t(row % map.box[1]), at[2] + int64_t(row / map.box[1] % map.box[2]),
            at[3] + int64_t(row / map.box[1] / map.box[2])};
  }
  // That of the 16-byte chunk at an address in shared memory.
  TensorPlace place_of_chunk(unsigned chunk_address) const {
    const unsigned offset = swizzled(chunk_address, map.swizzle) - address;
    TensorPlace place = this->place(offset >> __builtin_ctz(map.swizzle));
    place.column += (offset & (map.swizzle - 1)) / 2;
    return place;
  }
  bool contains(const TensorPlace& place) const {
    return place.row >= 0 && place.row < map.sizes[1] && place.head >= 0 && place.head < map.sizes[2] &&
           place.batch >= 0 && place.batch < map.sizes[3];
  }
  // For each row that is partly inside the tensor: its number, global address, first byte and number of bytes.
  template <class Row>
  void rows_inside(Row row) const {
    const int64_t first = std::max<int64_t>(0, -int64_t(at[0]));
    const int64_t end = std::min<int64_t>(map.box[0], int64_t(map.sizes[0]) - at[0]);
    if (first >= end) return;
    for (unsigned r = 0; r < map.rows(); r++) {
      const TensorPlace p = place(r);
      if (!contains(p)) continue;
      const uint64_t global = map.address + 2 * uint64_t(at[0] + first) + uint64_t(p.row) * map.strides[0] +
                              uint64_t(p.head) * map.strides[1] + uint64_t(p.batch) * map.strides[2];
      row(r, reinterpret_cast<uint8_t*>(global), unsigned(2 * first), unsigned(2 * (end - first)));
    }
  }
  std::string name() const { return format("box at column %d, row %d, head %d, batch %d", at[0], at[1], at[2], at[3]); }
};

}  // namespace emulator
