// TileShapes: how many rows and bytes each of the eight tile registers has, in the form that LDTILECFG reads.
//
// A tile has up to 16 rows of up to 64 bytes: 16 numbers of fp32, or 16 pairs of bf16. One instruction, TDPBF16PS, adds
// the products of two tiles to a third:
//
//                      right: 16 pairs of k, a word each     sums[n, m] += left[n, 2k] * right[k, m].low
//                      ┌ m ─► ───┐                                       + left[n, 2k + 1] * right[k, m].high
//                   k  │         │
//   left  ┌─ k ─► ──┐  └─────────┘
//      n  │ bf16    │  ┌─────────┐
//         └─────────┘  │ fp32    │  sums
//                      └─────────┘
//
// The order is that of the operation in Intel's Software Developer's Manual, volume 2, TDPBF16PS: the products of even
// k are summed from 0 on, those of odd k likewise, each by fused multiply-adds in the order of k; the two sums are
// added, then added to what the tile has. Each step rounds to nearest even, and subnormal numbers are zeros, given or
// computed. (Intel's Intrinsics Guide writes one sum instead of two. The check in linear/tile_check.h asks the
// processor.)
#pragma once

#include <cstdint>

namespace kvpage {

constexpr int64_t kTileSide = 16;  // rows of a tile, and words in a row
constexpr int64_t kTileDepth = 32;  // numbers of bf16 in a row
constexpr int64_t kTileLine = 64;  // bytes of a row
constexpr int64_t kTileBytes = 1024;  // of a whole tile

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  void set(int tile, int64_t rows, int64_t bytes) {
    num_rows[tile] = static_cast<uint8_t>(rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

}  // namespace kvpage
