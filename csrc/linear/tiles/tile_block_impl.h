// A block of two by two tiles of sums, kept in registers while K passes.
//
//                    x, in pairs
//                    ┌ m ─► 16  ┬ m ─► 16 ┐
//              k     │  tile 6  │  tile 7 │   a row has a pair of k for each m
//    w  ┌─ k ─► 32 ─┐├──────────┼─────────┤
//    n  │  tile 4   ││  tile 0  │  tile 1 │
//       ├───────────┤├──────────┼─────────┤   sums[n, m] in fp32
//    n  │  tile 5   ││  tile 2  │  tile 3 │
//       └───────────┘└──────────┴─────────┘
//
// The product is a turned one: rows of w are the left factor, so w is read as it lies, and x, which is smaller, is what
// is put in pairs.
//
// The bound: a TDPBF16PS makes 16 * 16 * 32 = 8,192 multiply-adds in 16 cycles, so 1,024 operations of bf16 a cycle. A
// tile is loaded in 8 cycles at best, out of the first cache. One sum at a time would load two tiles for each product,
// 16 cycles of loads beside 16 of products. Two by two sums load four tiles for four products. All eight registers are
// used.
#pragma once

#include <cstddef>

#include "linear/tiles/tile_shapes.h"

namespace kvpage {
namespace {

struct LeftTile {
  const std::byte* at;
  int64_t stride, step;  // bytes from a row to the next one, and from 32 numbers of k to the next 32
};

struct RightTile {
  const std::byte* at;
  int64_t width;  // rows of x, at most 16; 0: there is no such tile
  int64_t stride() const { return width * 4; }
};

struct TileBlock {
  LeftTile left[2];
  RightTile right[2];
  int64_t num_steps;
  float* sums;  // [32, sums_stride]
  int64_t sums_stride;
  bool adds;  // to what is there
};

inline TileShapes shapes_of(int64_t first_width, int64_t second_width) {
  TileShapes shapes;
  for (int tile : {0, 2, 6}) shapes.set(tile, kTileSide, first_width * 4);
  if (second_width > 0)
    for (int tile : {1, 3, 7}) shapes.set(tile, kTileSide, second_width * 4);
  for (int tile : {4, 5}) shapes.set(tile, kTileSide, kTileLine);
  return shapes;
}

// Lines of w that come soon, into the first cache: a tile's rows lie further apart than a processor looks ahead.
constexpr int64_t kStepsAhead = 8;

inline void fetch_ahead(const std::byte* at, const LeftTile& left) {
  for (int64_t row = 0; row < kTileSide; ++row) __builtin_prefetch(at + row * left.stride + kStepsAhead * left.step);
}

template <bool kIsWide, typename Tiles>
__attribute__((always_inline)) inline void begin_sums(Tiles& tiles, const TileBlock& block) {
  const int64_t stride = block.sums_stride * 4;
  float* const below = block.sums + kTileSide * block.sums_stride;
  if (!block.adds) {
    tiles.template zero<0>();
    tiles.template zero<2>();
    if constexpr (kIsWide) tiles.template zero<1>(), tiles.template zero<3>();
    return;
  }
  tiles.template load<0>(block.sums, stride);
  tiles.template load<2>(below, stride);
  if constexpr (kIsWide) {
    tiles.template load<1>(block.sums + kTileSide, stride);
    tiles.template load<3>(below + kTileSide, stride);
  }
}

template <bool kIsWide, typename Tiles>
__attribute__((always_inline)) inline void end_sums(Tiles& tiles, const TileBlock& block) {
  const int64_t stride = block.sums_stride * 4;
  float* const below = block.sums + kTileSide * block.sums_stride;
  tiles.template store<0>(block.sums, stride);
  tiles.template store<2>(below, stride);
  if constexpr (kIsWide) {
    tiles.template store<1>(block.sums + kTileSide, stride);
    tiles.template store<3>(below + kTileSide, stride);
  }
}

// kIsWide: there is a second tile of x. kFetches: w comes out of memory.
template <bool kIsWide, bool kFetches, typename Tiles>
__attribute__((noinline)) void add_block(Tiles& tiles, const TileBlock& block) {
  begin_sums<kIsWide>(tiles, block);
  const LeftTile upper = block.left[0], lower = block.left[1];
  const int64_t stride = block.right[0].stride(), stride_beside = block.right[1].stride();
  const std::byte *w = upper.at, *w_below = lower.at, *x = block.right[0].at, *x_beside = block.right[1].at;
  for (int64_t step = 0; step < block.num_steps; ++step) {
    if constexpr (kFetches) fetch_ahead(w, upper), fetch_ahead(w_below, lower);
    tiles.template load<4>(w, upper.stride);
    tiles.template load<6>(x, stride);
    tiles.template multiply_add<0, 4, 6>();
    if constexpr (kIsWide) {
      tiles.template load<7>(x_beside, stride_beside);
      tiles.template multiply_add<1, 4, 7>();
    }
    tiles.template load<5>(w_below, lower.stride);
    tiles.template multiply_add<2, 5, 6>();
    if constexpr (kIsWide) tiles.template multiply_add<3, 5, 7>();
    w += upper.step, w_below += lower.step;
    x += kTileSide * stride, x_beside += kTileSide * stride_beside;
  }
  end_sums<kIsWide>(tiles, block);
}

// Rows of w as tiles, one step of K after the other, with zeros past the last row and the last number.
inline void copy_tiles(const std::byte* from, int64_t stride, int64_t num_rows, int64_t num_bytes, std::byte* to) {
  for (int64_t row = 0; row < kTileSide; ++row)
    for (int64_t at = 0; at < num_bytes; at += kTileLine) {
      std::byte* const line = to + at * kTileSide + row * kTileLine;
      const int64_t count = row < num_rows ? (num_bytes - at < kTileLine ? num_bytes - at : kTileLine) : 0;
      if (count == kTileLine) {
        std::memcpy(line, from + row * stride + at, kTileLine);
        continue;
      }
      std::memset(line, 0, kTileLine);
      if (count > 0) std::memcpy(line, from + row * stride + at, static_cast<size_t>(count));
    }
}

}  // namespace
}  // namespace kvpage
