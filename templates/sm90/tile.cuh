// ---- Tiles in shared memory, as TMA leaves them and wgmma reads them
//
// A tile of R rows is cut into panels of R rows by 64 columns (128 bytes). Inside a panel TMA XORs the index of a
// 16-byte chunk with the row (128-byte swizzle), and wgmma takes the XOR back. Columns beyond the head dim are zero:
// TMA fills what lies outside the tensor.

constexpr int kPanels = (kHeadDim + 63) / 64;
constexpr int kPanelRowBytes = 128;
constexpr int kGroupRows = 64;  // query rows of a warpgroup
constexpr u32 kQueryPanelBytes = kGroupRows * kPanelRowBytes;
constexpr u32 kKeyPanelBytes = kBlockN * kPanelRowBytes;
constexpr u32 kQueryTileBytes = kPanels * kQueryPanelBytes;  // of Q, for one warpgroup
constexpr u32 kKeyTileBytes = kPanels * kKeyPanelBytes;  // one tile of K or V

// Byte offset of a 16-byte chunk of a panel's row.
FUNC u32 swizzled(int row, int chunk) { return row * kPanelRowBytes + ((chunk ^ (row & 7)) * 16); }

// What wgmma needs to know of an operand. The high word is a constant: groups of 8 rows are 1024 bytes apart, and the
// swizzle has 128 bytes. Steps along an operand are additions to the low word, in units of 16 bytes, for the hardware
// XORs bits of the final address.

// Of a K-major operand (Q, K, P), whose rows are what it is multiplied along.
FUNC u32 k_major(u32 tile) { return tile >> 4; }
// Of an MN-major operand (V), whose panels lie `panel_bytes` apart.
FUNC u32 mn_major(u32 tile, u32 panel_bytes) { return tile >> 4 | panel_bytes >> 4 << 16; }
FUNC u64 descriptor(u32 low) { return u64(1024 >> 4 | 1 << 30) << 32 | low; }

// From a K-major operand's first 16 columns to those of step k, in units of the low word.
FUNC u32 k_step(int k, u32 panel_bytes) { return k / 4 * (panel_bytes >> 4) + k % 4 * 2; }
