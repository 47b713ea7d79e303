// Products in bf16 by tiles: LinearKernel's stage and multiply where the processor has AMX, or a model of it.
//
//   stage      x ─► pairs      tiles of 16 rows of x, one after the other: [pair of k][row], a word each
//   multiply   for a panel of 64 columns, blocks of two by two tiles (linear/tiles/tile_block_impl.h)
//
// Every row of a layer goes this way, however few there are: with another code for few rows, bits would depend on their
// number. One row takes a tile of one column, whose products are as slow as those of 16 rows. But then w comes out of
// memory, and a core waits for that longer than for the products.
//
// Sums take K by 32 numbers from its beginning on, whatever the other rows, columns, blocks and threads are. What lies
// between two blocks of K is stored as fp32, which changes no bit. So a row's result is the same in every batch.
#pragma once

#include <algorithm>

#include "linear/gate_impl.h"
#include "linear/linear_task.h"
#include "simd/transpose_kernel.h"

#if defined(KVPAGE_TAKES_TILES)
#include "linear/tiles/hardware_tiles_impl.h"
#elif defined(KVPAGE_MODELS_TILES)
#include "linear/tiles/model_tiles_impl.h"
#endif
#include "linear/tiles/tile_block_impl.h"

namespace kvpage {
namespace {

#if defined(KVPAGE_TAKES_TILES)
using Tiles = HardwareTiles;
#else
using Tiles = ModelTiles;
#endif

constexpr int64_t kTileRowUnit = 48;  // whole tiles, and whole tiles of other types
static_assert(4 * kTileSide == kPanelColumns);
static_assert(2 * kTileSide * kMostK * 2 <= kTileScratch * 4);  // two tiles of w, of a block of K

// --- x in pairs ------------------------------------------------------------------------------------------------------

// Tile `number` of the rows in scratch.
struct PairTile {
  std::byte* pairs;
  int64_t first_row, width;

  PairTile(const LinearTask& task, int64_t number)
      : first_row(number * kTileSide), width(std::min(kTileSide, task.num_rows - first_row)) {
    const int64_t depth = (task.blocks.size + kTileDepth - 1) / kTileDepth * kTileDepth;
    pairs = const_cast<std::byte*>(task.x) + first_row * depth * 2;
  }
  RightTile from(int64_t k) const { return {pairs + k / 2 * width * 4, width}; }
};

// Rows [first, end) of a tile: pairs of k, the last number with a zero, and zeros up to 32 numbers.
inline void stage_pairs(const PairTile& tile, const std::byte* x, int64_t x_stride, int64_t size, int64_t first,
                        int64_t end) {
  std::byte* const to = tile.pairs + (first - tile.first_row) * 4;
  const std::byte* const from = x + first * x_stride;
  const int64_t stride = tile.width * 4, depth = (size + kTileDepth - 1) / kTileDepth * kTileDepth;
  transpose(4, {to, stride, from, x_stride, end - first, size / 2});
  for (int64_t pair = size / 2; pair < depth / 2; ++pair) {
    std::memset(to + pair * stride, 0, static_cast<size_t>(end - first) * 4);
    for (int64_t row = 0; 2 * pair < size && row < end - first; ++row)
      std::memcpy(to + pair * stride + row * 4, from + row * x_stride + 2 * pair * 2, 2);
  }
}

inline void stage_by_tiles(const LinearTask& task, const std::byte* x, int64_t x_stride) {
  for (int64_t row = task.first_row; row < task.end_row;) {
    const PairTile tile(task, row / kTileSide);
    const int64_t end = std::min(tile.first_row + tile.width, task.end_row);
    stage_pairs(tile, x, x_stride, task.blocks.size, row, end);
    row = end;
  }
}

// --- w, as it lies ---------------------------------------------------------------------------------------------------

// A panel's columns as four tiles: 64 columns, or of the gated form 16 columns of the gate, of the other weight, and so
// on.
struct TilePanel {
  const LinearTask& task;
  int64_t first, end;  // columns of out

  bool is_gated() const { return task.activation != Activation::kNone; }
  static int64_t most_columns(const LinearTask& task) {
    return task.activation == Activation::kNone ? kPanelColumns : kPanelColumns / 2;
  }
  int64_t column(int tile) const { return first + (is_gated() ? tile / 2 : tile) * kTileSide; }
  int64_t num_rows(int tile) const { return std::clamp<int64_t>(end - column(tile), 0, kTileSide); }
  int64_t stride(int tile) const { return is_gated() && tile % 2 == 1 ? task.up_stride : task.w_stride; }
  const std::byte* at(int tile, int64_t k) const {
    const std::byte* const w = is_gated() && tile % 2 == 1 ? task.up : task.w;
    return w + std::min(column(tile), end - 1) * stride(tile) + k * 2;
  }
  LeftTile left(int tile, int64_t k) const { return {at(tile, k), stride(tile), kTileLine}; }
};

// Two tiles of w from number `k` on, in scratch.
inline void copy_pair(const TilePanel& panel, int first, int64_t k, int64_t width, float* scratch, LeftTile* to) {
  const int64_t bytes = (width + kTileDepth - 1) / kTileDepth * kTileBytes;
  for (int i = 0; i < 2; ++i) {
    std::byte* const place = reinterpret_cast<std::byte*>(scratch) + i * bytes;
    copy_tiles(panel.at(first + i, k), panel.stride(first + i), panel.num_rows(first + i), width * 2, place);
    to[i] = {place, kTileLine, kTileBytes};
  }
}

// --- a panel ---------------------------------------------------------------------------------------------------------

// The registers, in the shapes of the last block.
class ShapedTiles {
 public:
  template <bool kFetches>
  void add(const TileBlock& block) {
    const int64_t first = block.right[0].width, second = block.right[1].width;
    if (first != first_ || second != second_) tiles_.configure(shapes_of(first, second));
    first_ = first, second_ = second;
    if (second > 0) return add_block<true, kFetches>(tiles_, block);
    add_block<false, kFetches>(tiles_, block);
  }

 private:
  Tiles tiles_;
  int64_t first_ = 0, second_ = 0;
};

class TileProduct {
 public:
  TileProduct(const LinearTask& task, const LinearScratch& scratch)
      : task_(task),
        scratch_(scratch),
        first_tile_(task.first_row / kTileSide),
        end_tile_((task.end_row + kTileSide - 1) / kTileSide) {}

  void multiply() {
    const int64_t most = TilePanel::most_columns(task_);
    for (int64_t column = task_.first_column; column < task_.end_column; column += most) {
      const TilePanel panel{task_, column, std::min(column + most, task_.end_column)};
      add_panel(panel);
      finish(panel);
    }
  }

 private:
  // Where two tiles of x are all, each tile of w is read once, as it lies. Else copies of w stay in the first cache
  // while all rows of x pass: rows of w that lie pages apart share few sets of it.
  void add_panel(const TilePanel& panel) {
    const KBlocks& blocks = task_.blocks;
    if (blocks.num_blocks == 0) return static_cast<void>(std::memset(scratch_.sums, 0, kPanelColumns * kRowBlock * 4));
    for (int pair = 0; pair < 4; pair += 2) {
      if (panel.num_rows(pair) == 0) continue;
      const bool is_whole = panel.num_rows(pair) == kTileSide && panel.num_rows(pair + 1) == kTileSide;
      if (is_whole && end_tile_ - first_tile_ <= 2) {
        add_as_it_lies(panel, pair);
      } else {
        for (int64_t block = 0; block < blocks.num_blocks; ++block)
          add_copied(panel, pair, blocks.begin(block), blocks.width(block));
      }
    }
  }

  void add_as_it_lies(const TilePanel& panel, int pair) {
    const int64_t whole = task_.blocks.size / kTileDepth * kTileDepth, rest = task_.blocks.size - whole;
    TileBlock block = block_of(pair, first_tile_, 0, whole);
    block.left[0] = panel.left(pair, 0), block.left[1] = panel.left(pair + 1, 0);
    tiles_.add<true>(block);
    if (rest > 0) add_copied(panel, pair, whole, rest);
  }

  void add_copied(const TilePanel& panel, int pair, int64_t k, int64_t width) {
    LeftTile left[2];
    copy_pair(panel, pair, k, width, scratch_.tile, left);
    for (int64_t tile = first_tile_; tile < end_tile_; tile += 2) {
      TileBlock block = block_of(pair, tile, k, width);
      block.left[0] = left[0], block.left[1] = left[1];
      tiles_.add<false>(block);
    }
  }

  // All but its tiles of w.
  TileBlock block_of(int pair, int64_t tile, int64_t k, int64_t width) const {
    const RightTile none{task_.x, 0};
    return {{},
            {PairTile(task_, tile).from(k), tile + 1 < end_tile_ ? PairTile(task_, tile + 1).from(k) : none},
            (width + kTileDepth - 1) / kTileDepth,
            scratch_.sums + pair * kTileSide * kRowBlock + tile * kTileSide - task_.first_row,
            kRowBlock,
            k > 0};
  }

  void finish(const TilePanel& panel) const {
    alignas(64) float rows[kTileSide * kPanelColumns];
    constexpr int64_t kRow = kPanelColumns * 4;
    for (int64_t row = task_.first_row; row < task_.end_row; row += kTileSide) {
      const int64_t count = std::min(kTileSide, task_.end_row - row);
      const auto* const sums = reinterpret_cast<const std::byte*>(scratch_.sums + row - task_.first_row);
      transpose(4, {reinterpret_cast<std::byte*>(rows), kRow, sums, kRowBlock * 4, kPanelColumns, count});
      for (int64_t i = 0; i < count; ++i) finish_one(panel, row + i, rows + i * kPanelColumns);
    }
  }

  void finish_one(const TilePanel& panel, int64_t row, const float* sums) const {
    Bf16* const to = reinterpret_cast<Bf16*>(task_.out + row * task_.out_stride) + panel.first;
    const int64_t count = panel.end - panel.first;
    const Bf16* const bias = task_.bias ? reinterpret_cast<const Bf16*>(task_.bias) + panel.first : nullptr;
    if (!panel.is_gated()) return finish_row(Activation::kNone, sums, bias, count, to);
    for (int64_t at = 0; at < count; at += kTileSide)
      finish_beside(task_.activation, sums + 2 * at, sums + 2 * at + kTileSide, std::min(kTileSide, count - at),
                    to + at);
  }

  const LinearTask& task_;
  const LinearScratch& scratch_;
  const int64_t first_tile_, end_tile_;  // of x, among those in scratch
  ShapedTiles tiles_;
};

inline void multiply_by_tiles(const LinearTask& task, const LinearScratch& scratch) {
  TileProduct(task, scratch).multiply();
}

}  // namespace
}  // namespace kvpage
