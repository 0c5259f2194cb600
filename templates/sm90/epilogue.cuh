// ---- Epilogue: O = acc_o / l and L = m + ln(l) leave

// Where L of this thread's first row lies. `row` is that row.
FUNC gptr<float> lse_of(int row, const WorkTile& work, const FwdParams& p) {
  return p.softmax_lse + ((i64(work.batch) * p.num_heads + work.head) * p.seqlen_q + row);
}

// Normalises O and stores L. `row` is this thread's first row.
FUNC void finish_rows(OutputTile& acc_o, const SoftmaxState& softmax, int row, const WorkTile& work,
                      const FwdParams& p) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = quad_sum(softmax.row_sum[r]);
    const float inverse = sum == 0.f ? 0.f : rcp(sum);  // a row with no visible key: O = 0, L = -inf
#pragma unroll
    for (int n = 0; n < kColumnsO / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) acc_o[4 * n + 2 * r + e] *= inverse;
    if (p.softmax_lse.address && threadIdx.x % 4 == 0 && row + r * 8 < p.seqlen_q)
      st_global(lse_of(row, work, p) + r * 8,
                sum == 0.f ? neg_inf() : fma_f32(softmax.row_max[r], p.softmax_scale, lg2(sum) * kLn2));
  }
}

// O to this warpgroup's part of the Q tile, which it has read, and from there by TMA. The store is the group leader's,
// which has to wait for it before the tile may be refilled.
FUNC void store_by_tma(const OutputTile& acc_o, u32 tile_q, int group, const WorkTile& work, const FwdParams& p) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kColumnsO / 16; step++) {
    const float* o = acc_o + 8 * step;
    stmatrix_x4(tile_q + step / 4 * kQueryPanelBytes + swizzled(row, step % 4 * 2 + lane / 16),
                pack2<Element>(o[0], o[1]), pack2<Element>(o[2], o[3]), pack2<Element>(o[4], o[5]),
                pack2<Element>(o[6], o[7]));
  }
  fence_proxy_async();
  bar_sync(kOutputBarrier + group, 128);
  if (!is_group_leader()) return;
#pragma unroll
  for (int panel = 0; panel < kPanels; panel++)
    tma_store(p.o_map, tile_q + panel * kQueryPanelBytes, panel * 64, work.m_block * kBlockM + group * kGroupRows,
              work.head, work.batch);
  tma_store_commit();
}

// O straight from registers. Four lanes exchange what they have of a row's four n8 tiles, so that each holds one whole
// tile's 16 bytes: a 4 x 4 transpose in two rounds, in which a lane sends the half that its partner keeps.
FUNC void store_directly(const OutputTile& acc_o, int row, const WorkTile& work, const FwdParams& p) {
  const int place = threadIdx.x % 4;
  const gptr<Element> o = p.o + (work.batch * p.o_batch_stride + work.head * p.o_head_stride);
#pragma unroll
  for (int quad = 0; quad < (kColumnsO + 31) / 32; quad++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 piece[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int n = 4 * quad + i;
        piece[i] = n < kColumnsO / 8 ? pack2<Element>(acc_o[4 * n + 2 * r], acc_o[4 * n + 2 * r + 1]) : 0;
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 theirs = shfl_xor(place & 1 ? piece[i] : piece[i + 1], 1);
        piece[i] = place & 1 ? theirs : piece[i];
        piece[i + 1] = place & 1 ? piece[i + 1] : theirs;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 theirs = shfl_xor(place & 2 ? piece[i] : piece[i + 2], 2);
        piece[i] = place & 2 ? theirs : piece[i];
        piece[i + 2] = place & 2 ? piece[i + 2] : theirs;
      }
      const int column = 32 * quad + 8 * place;
      if (row + r * 8 < p.seqlen_q && column < kHeadDim)
        st_global(o + ((row + r * 8) * p.o_row_stride + column), u32x4{piece[0], piece[1], piece[2], piece[3]});
    }
}

// O = 0 and L = -inf: rows that see no key. Four lanes write a row's chunks in turn.
FUNC void store_zeros(int row, const WorkTile& work, const FwdParams& p) {
  const int place = threadIdx.x % 4;
  const gptr<Element> o = p.o + (work.batch * p.o_batch_stride + work.head * p.o_head_stride);
#pragma unroll 1
  for (int r = 0; r < 2 && row + r * 8 < p.seqlen_q; r++) {
#pragma unroll 1
    for (int column = 8 * place; column < kHeadDim; column += 32)
      st_global(o + ((row + r * 8) * p.o_row_stride + column), u32x4{0, 0, 0, 0});
    if (p.softmax_lse.address && place == 0) st_global(lse_of(row, work, p) + r * 8, neg_inf());
  }
}
