// What a wgmma reads: where its operands lie, whether they are there, and their product.
#include "block.h"
#include "warpgroups.h"

namespace emulator {

// From here on the product reads its operands in shared memory.
void Warpgroup::begin(Wgmma& product) {
  if (!product.what.a_in_registers) read_operand(product, OperandDescriptor::decode(product.what.a, "a"), false);
  read_operand(product, OperandDescriptor::decode(product.what.b, "b"), true);
  if (checks_) block_.shared.check_needs(product.needs, block_.accessor(), product.what.name());
}

void Warpgroup::read_operand(Wgmma& product, const OperandDescriptor& at, bool is_b) {
  const char* what = product.what.name();
  const Accessor who = block_.accessor();
  struct Seen {
    TensorPlace place;
    unsigned row, column, address;
  };
  bool seen_any = false;
  Seen first{};
  // Of what TMA brought, rows and columns of the operand are rows and columns of the tensor.
  auto read = [&](unsigned address, unsigned row, unsigned column) {
    block_.shared.read_async(address, number_, agent_, product.group + 1, who, what, product.site, product.needs);
    const BulkLoad* load = checks_ ? block_.shared.load_at(address) : nullptr;
    if (!load) return;
    const Seen here{load->box.place_of_chunk(address), row, column, address};
    if (!seen_any) {
      seen_any = true, first = here;
      return;
    }
    const int64_t rows = int64_t(row) - first.row, columns = 8 * (int64_t(column) - first.column);
    if (here.place.row - first.place.row == rows && here.place.column - first.place.column == columns &&
        here.place.head == first.place.head && here.place.batch == first.place.batch)
      return;
    throw Diagnostic(
        "wgmma-descriptor",
        format("%s: row %u, columns %u to %u of operand %s, at %s, are row %lld, column %lld, head %lld, batch %lld of "
               "their tensor, but row %u, columns %u to %u, at %s, are row %lld, column %lld, head %lld, batch %lld "
               "(descriptor: start 0x%x, leading offset %u, stride offset %u, rows of %u bytes)",
               what, row, 8 * column, 8 * column + 7, is_b ? "b" : "a", block_.shared.place(address).c_str(),
               (long long)here.place.row, (long long)here.place.column, (long long)here.place.head,
               (long long)here.place.batch, first.row, 8 * first.column, 8 * first.column + 7,
               block_.shared.place(first.address).c_str(), (long long)first.place.row, (long long)first.place.column,
               (long long)first.place.head, (long long)first.place.batch, at.start - kSmemBase, at.leading_bytes,
               at.stride_bytes, at.row_bytes));
  };
  if (is_b && product.what.transposed_b) {
    for (unsigned k = 0; k < kWgmmaK; k++)
      for (unsigned column = 0; column < product.what.n / 8; column++) read(at.mn_major(k, column), k, column);
  } else {
    for (unsigned row = 0; row < (is_b ? product.what.n : kWgmmaM); row++)
      for (unsigned column = 0; column < kWgmmaK / 8; column++) read(at.k_major(row, column), row, column);
  }
}

void Warpgroup::execute(Wgmma& product) {
  product.executed = true;
  const WgmmaIssue& what = product.what;
  float* c = product.chain->c.get();
  const bool is_bf16 = what.element == Element::kBf16;
  auto value = [&](unsigned bits) { return is_bf16 ? bf16_to_float(bits) : fp16_to_float(bits); };
  auto read_chunk = [&](unsigned address, float* to, unsigned step) {
    uint16_t elements[8];
    std::memcpy(elements, block_.shared.at(address), 16);
    for (unsigned i = 0; i < 8; i++) to[i * step] = value(elements[i]);
  };
  alignas(32) float a[kWgmmaM * kWgmmaK], b[kWgmmaK * kWgmmaMostN];
  if (what.a_in_registers) {
    for (unsigned t = 0; t < kWarpgroupSize; t++) {
      const unsigned* pairs = block_.options.lazy_wgmma ? product.a_registers[t] : product.a_values[t];
      float* at = a + (t / 32 * 16 + t % 32 / 4) * kWgmmaK + t % 4 * 2;
      const unsigned places[4] = {0, 8 * kWgmmaK, 8, 8 * kWgmmaK + 8};
      for (unsigned i = 0; i < 4; i++)
        at[places[i]] = value(pairs[i] & 0xffff), at[places[i] + 1] = value(pairs[i] >> 16);
    }
  } else {
    const OperandDescriptor from = OperandDescriptor::decode(what.a, "a");
    for (unsigned row = 0; row < kWgmmaM; row++)
      for (unsigned column = 0; column < 2; column++)
        read_chunk(from.k_major(row, column), a + row * kWgmmaK + 8 * column, 1);
  }
  const OperandDescriptor from = OperandDescriptor::decode(what.b, "b");
  if (what.transposed_b) {
    for (unsigned k = 0; k < kWgmmaK; k++)
      for (unsigned column = 0; column < what.n / 8; column++)
        read_chunk(from.mn_major(k, column), b + k * what.n + 8 * column, 1);
  } else {
    for (unsigned row = 0; row < what.n; row++)
      for (unsigned column = 0; column < 2; column++)
        read_chunk(from.k_major(row, column), b + 8 * column * what.n + row, what.n);
  }
  if (!what.accumulate) std::fill(c, c + kWgmmaM * what.n, 0.f);
  wgmma_product(c, a, b, what.n);
}

}  // namespace emulator
