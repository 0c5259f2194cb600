// ---- Schedule: which query block of which head a thread block works on
//
// The grid is one-dimensional (grid.x reaches 2^31 - 1; y and z stop at 65535). The hardware starts blocks in order, so
// the order is the schedule:
//   - heads go in sections whose K and V fit in half of L2 together (heads_per_section, from the host);
//   - inside a section the last query blocks start first: with a causal mask they are the longest, and the short ones
//     fill the gaps. Measured on an H200 at 8k, causal: +11 % (d 128), +5 % (d 64) over first-block-first;
//   - with a causal mask the short half of the query blocks (tail_m_blocks, from the host) is left to the end, for all
//     heads together, the longest first: a last section by itself has too few blocks to end evenly on all SMs.

struct WorkTile {
  int m_block, batch, head;  // a query head, or, where its query heads are packed, a key/value head
};

FUNC WorkTile work_tile(const FwdParams& p) {
  int id = blockIdx.x;
  const int num_heads = kPackGqa ? p.num_heads / kGqaRatio : p.num_heads;
  const int heads_in_all = p.batch * num_heads;  // counts (batch, head) pairs, as `head` does
  const int long_m_blocks = p.num_m_blocks - p.tail_m_blocks;
  const int long_tiles = long_m_blocks * heads_in_all;
  int first_head = 0, heads = heads_in_all, m_blocks = p.tail_m_blocks;
  if (id < long_tiles) {
    const int section_tiles = long_m_blocks * p.heads_per_section;
    first_head = id / section_tiles * p.heads_per_section;
    id %= section_tiles;
    heads = min_i32(p.heads_per_section, heads_in_all - first_head);  // the last section may be smaller
    m_blocks = p.num_m_blocks;
  } else {
    id -= long_tiles;
  }
  const int head = first_head + id % heads;
  return {m_blocks - 1 - id / heads, head / num_heads, head % num_heads};
}
