// The body of LinearKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#pragma once

#include <type_traits>

#include "linear/dot_tile_impl.h"
#include "linear/gate_impl.h"
#include "linear/linear_kernel.h"

#if defined(KVPAGE_TAKES_TILES) || defined(KVPAGE_MODELS_TILES)
#include "linear/tile_product_impl.h"
#define KVPAGE_HAS_TILES 1
#endif

namespace kvpage {
namespace {

constexpr int64_t kManyTiles = 8;  // of x

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// --- rows of x in scratch ------------------------------------------------------------------------------------------

// Writes `count` elements, and zeros up to a whole vector.
template <typename T>
void stage_run(const T* from, int64_t count, float* to) {
  for_each_vector(
      count, [&](int64_t k) { store(to + k, load(from + k)); },
      [&](int64_t k, int64_t rest) { store(to + k, load_partial(from + k, rest)); });
}

inline void stage_run(const Bf16* from, int64_t count, Bf16* to) {
  const int64_t padded = (count + PairDot::kWidth - 1) / PairDot::kWidth * PairDot::kWidth;
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(Bf16));
  std::memset(to + count, 0, static_cast<size_t>(padded - count) * sizeof(Bf16));
}

template <typename Dot>
void stage_typed(const LinearTask& task, const std::byte* x, int64_t x_stride) {
  const KBlocks& blocks = task.blocks;
  auto* const staged = reinterpret_cast<typename Dot::Staged*>(const_cast<std::byte*>(task.x));
  for (int64_t row = task.first_row; row < task.end_row; ++row)
    for (int64_t block = 0; block < blocks.num_blocks; ++block) {
      const auto* const from = reinterpret_cast<const typename Dot::Weight*>(x + row * x_stride);
      stage_run(from + blocks.begin(block), blocks.width(block),
                staged + (block * task.num_rows + row) * blocks.row_size());
    }
}

// --- a panel: all K of some columns --------------------------------------------------------------------------------

// The columns of a panel in tiles. A tile of the gated form has half of its rows from each weight, so that both sums of
// a result lie beside each other.
inline bool is_gated(const LinearTask& task) { return task.activation != Activation::kNone; }

template <typename T>
struct Panel {
  const LinearTask& task;
  int64_t first, end;  // columns of out

  static int64_t most_columns(const LinearTask& task) { return is_gated(task) ? kPanelColumns / 2 : kPanelColumns; }
  int64_t columns_per_tile() const { return is_gated(task) ? kTileColumns / 2 : kTileColumns; }
  int64_t num_tiles() const { return (end - first + columns_per_tile() - 1) / columns_per_tile(); }

  // Past the last column the last one is taken again: its sums are not used.
  Columns<T> columns(int64_t tile, int64_t block) const {
    Columns<T> found;
    for (int64_t j = 0; j < kTileColumns; ++j) {
      const bool is_up = is_gated(task) && j >= kTileColumns / 2;
      const int64_t column = first + tile * columns_per_tile() + (is_up ? j - kTileColumns / 2 : j);
      const std::byte* row =
          (is_up ? task.up : task.w) + least(column, end - 1) * (is_up ? task.up_stride : task.w_stride);
      found.rows[j] = reinterpret_cast<const T*>(row) + task.blocks.begin(block);
    }
    return found;
  }
};

template <Pass kPass, typename Dot>
void tile_of(int64_t num_rows, const Operands<Dot>& operands, const Sums& sums) {
  switch (num_rows) {
#if KVPAGE_LANES == 16
    case 6: return dot_tile<6, kPass>(operands, sums);
    case 5: return dot_tile<5, kPass>(operands, sums);
    case 4: return dot_tile<4, kPass>(operands, sums);
#endif
    case 3: return dot_tile<3, kPass>(operands, sums);
    case 2: return dot_tile<2, kPass>(operands, sums);
    default: return dot_tile<1, kPass>(operands, sums);
  }
}

// Rows of x in tiles of nearly the same height.
struct RowTiles {
  int64_t num, height, num_higher;

  explicit RowTiles(int64_t num_rows)
      : num((num_rows + kTileRows - 1) / kTileRows), height(num_rows / num), num_higher(num_rows % num) {}
  int64_t height_of(int64_t tile) const { return height + (tile < num_higher); }
};

// The next tile of w, fetched part by part between `num_parts` tiles of x into the second cache.
class FetchParts {
 public:
  FetchParts(const Columns<std::byte>& next, int64_t row_bytes, int64_t num_parts)
      : next_(next), lines_((row_bytes + 63) / 64), part_((lines_ * kTileColumns + num_parts - 1) / num_parts) {}

  void fetch_part() {
    for (int64_t i = 0; i < part_ && row_ < kTileColumns; ++i) {
      __builtin_prefetch(next_.rows[row_] + 64 * line_, 0, 2);
      if (++line_ == lines_) line_ = 0, ++row_;
    }
  }

 private:
  const Columns<std::byte>& next_;
  int64_t lines_, part_, row_ = 0, line_ = 0;
};

// Past the last whole vector of a K block: what is left of each row, with zeros after it.
template <typename Dot>
struct RowEnds {
  using T = typename Dot::Weight;
  T elements[kTileColumns][Dot::kWidth];

  Columns<T> fill(const Columns<T>& columns, int64_t width) {
    const int64_t whole = width / Dot::kWidth * Dot::kWidth;
    Columns<T> ends;
    for (int64_t j = 0; j < kTileColumns; ++j) ends.rows[j] = elements[j];
    if (whole == width) return ends;
    std::memset(elements, 0, sizeof(elements));
    for (int64_t j = 0; j < kTileColumns; ++j)
      std::memcpy(elements[j], columns.rows[j] + whole, static_cast<size_t>(width - whole) * sizeof(T));
    return ends;
  }
};

// The rows of a task, tile by tile.
struct RowPass {
  const RowTiles& tiles;
  FetchParts parts;
  Sums sums;
  int64_t tile = 0;

  template <Pass kPass, typename Dot>
  void multiply_next(Operands<Dot>& operands) {
    const int64_t height = tiles.height_of(tile++);
    if constexpr (kPass != Pass::kFetches) parts.fetch_part();
    tile_of<kPass>(height, operands, sums);
    operands.x += height * operands.x_stride;
    sums.data += height * kPanelColumns;
  }

  // All that are left. The last of them fetches into the first cache.
  template <typename Dot>
  void multiply_rest(Operands<Dot> operands) {
    while (tile + 1 < tiles.num) multiply_next<Pass::kReads>(operands);
    multiply_next<Pass::kFetches>(operands);
  }
};

// A tile of w as it was kept in scratch.
template <typename Dot>
Operands<WidenedDot<float>> kept_operands(const Operands<Dot>& from) {
  Operands<WidenedDot<float>> to{from.x, from.x_stride, from.size, {}, {}, from.next, from.next_size, nullptr};
  for (int64_t j = 0; j < kTileColumns; ++j) {
    to.columns.rows[j] = from.kept + j * from.x_stride;
    to.ends.rows[j] = to.columns.rows[j] + from.size / kLanes * kLanes;
  }
  return to;
}

// 16-bit numbers are widened once. Rows of fp32 that lie pages apart share few sets of the first cache: for many rows
// of x, copies of them that lie side by side pay.
template <typename Dot>
bool keeps_tile(const LinearTask& task, const RowTiles& tiles) {
  if (sizeof(typename Dot::Weight) < sizeof(typename Dot::Staged)) return tiles.num > 1;
  return tiles.num >= kManyTiles && task.blocks.num_blocks > 1;
}

template <typename T>
Columns<std::byte> as_bytes(const Columns<T>& columns) {
  Columns<std::byte> bytes;
  for (int64_t j = 0; j < kTileColumns; ++j) bytes.rows[j] = reinterpret_cast<const std::byte*>(columns.rows[j]);
  return bytes;
}

// One tile of w with all rows of the task.
template <typename Dot>
void multiply_tile(const LinearTask& task, const LinearScratch& scratch, int64_t block, const RowTiles& tiles,
                   const Columns<typename Dot::Weight>& columns, const Columns<typename Dot::Weight>& next,
                   const Sums& sums) {
  const int64_t stride = task.blocks.row_size(), size = task.blocks.width(block);
  const auto* const x = reinterpret_cast<const typename Dot::Staged*>(task.x);
  RowEnds<Dot> ends;
  Operands<Dot> operands{x + (block * task.num_rows + task.first_row) * stride,
                         stride,
                         size,
                         columns,
                         ends.fill(columns, size),
                         as_bytes(next),
                         sizeof(typename Dot::Weight),
                         scratch.tile};
  RowPass pass{tiles, {operands.next, size * operands.next_size, tiles.num}, sums};
  if constexpr (std::is_same_v<typename Dot::Factor, Vec>) {
    if (keeps_tile<Dot>(task, tiles)) {
      pass.template multiply_next<Pass::kKeeps>(operands);
      return pass.multiply_rest(kept_operands(operands));
    }
  }
  pass.multiply_rest(operands);
}

// The tiles of a panel, each a K block of some columns, one after the other.
struct TileOrder {
  int64_t num_tiles, num_blocks;
  bool by_tile;  // all K of a tile before the next tile: the order of memory

  int64_t num() const { return num_tiles * num_blocks; }
  int64_t tile(int64_t i) const { return by_tile ? i / num_blocks : i % num_tiles; }
  int64_t block(int64_t i) const { return by_tile ? i % num_blocks : i / num_tiles; }
};

// Where one tile of x takes every row of the task, w is read once: then in the order of memory. Else a K block of x
// stays in the second cache while all tiles of the panel pass.
template <typename Dot>
void multiply_panel(const LinearTask& task, const LinearScratch& scratch, const RowTiles& tiles,
                    const Panel<typename Dot::Weight>& panel) {
  using Weight = typename Dot::Weight;
  const TileOrder order{panel.num_tiles(), task.blocks.num_blocks, tiles.num == 1};
  if (order.num() == 0) return;
  Columns<Weight> columns = panel.columns(0, 0);
  for (int64_t i = 0; i < order.num(); ++i) {
    Columns<Weight> next = columns;
    if (i + 1 < order.num()) {
      next = panel.columns(order.tile(i + 1), order.block(i + 1));
    } else if (panel.end < task.end_column) {
      next = Panel<Weight>{task, panel.end, task.end_column}.columns(0, 0);
    }
    const Sums sums{scratch.sums + order.tile(i) * kTileColumns, order.block(i) > 0};
    multiply_tile<Dot>(task, scratch, order.block(i), tiles, columns, next, sums);
    columns = next;
  }
}

template <typename Dot>
void multiply_typed(const LinearTask& task, const LinearScratch& scratch) {
  using T = typename Dot::Weight;
  const RowTiles tiles(task.end_row - task.first_row);
  const int64_t most = Panel<T>::most_columns(task);
  for (int64_t column = task.first_column; column < task.end_column; column += most) {
    const Panel<T> panel{task, column, least(column + most, task.end_column)};
    if (task.blocks.num_blocks == 0) std::memset(scratch.sums, 0, (task.end_row - task.first_row) * kPanelColumns * 4);
    multiply_panel<Dot>(task, scratch, tiles, panel);
    for (int64_t row = task.first_row; row < task.end_row; ++row) {
      T* to = reinterpret_cast<T*>(task.out + row * task.out_stride) + column;
      const T* bias = task.bias ? reinterpret_cast<const T*>(task.bias) + column : nullptr;
      finish_row(task.activation, scratch.sums + (row - task.first_row) * kPanelColumns, bias, panel.end - column, to);
    }
  }
}

void stage(const LinearTask& task, const std::byte* x, int64_t x_stride) {
  switch (task.type) {
#if KVPAGE_HAS_TILES
    case RowType::kBfloat16: return stage_by_tiles(task, x, x_stride);
#else
    case RowType::kBfloat16: return stage_typed<Bf16Dot>(task, x, x_stride);
#endif
    case RowType::kFloat16: return stage_typed<WidenedDot<Fp16>>(task, x, x_stride);
    default: return stage_typed<WidenedDot<float>>(task, x, x_stride);
  }
}

void multiply(const LinearTask& task, const LinearScratch& scratch) {
  switch (task.type) {
#if KVPAGE_HAS_TILES
    case RowType::kBfloat16: return multiply_by_tiles(task, scratch);
#else
    case RowType::kBfloat16: return multiply_typed<Bf16Dot>(task, scratch);
#endif
    case RowType::kFloat16: return multiply_typed<WidenedDot<Fp16>>(task, scratch);
    default: return multiply_typed<WidenedDot<float>>(task, scratch);
  }
}

int64_t multiply_adds(int64_t num_rounds) {
  constexpr int kSums = kTileRows * kTileColumns;
  Vec sums[kSums], half = splat(0.5f), one = splat(1.0f);
  for_each_constant<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = one * static_cast<float>(i); });
  for (int64_t round = 0; round < num_rounds; ++round)
    for_each_constant<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = sums[i] * half + one; });
  float sink = 0;
  for_each_constant<kSums>([&](auto i) __attribute__((always_inline)) { sink += sums[i][0]; });
  const volatile float kept = sink;  // so that the sums are needed
  static_cast<void>(kept);
  return 2 * kSums * kLanes * num_rounds;
}

#if KVPAGE_HAS_TILES
constexpr int64_t kRowUnit = kTileRowUnit;
#else
constexpr int64_t kRowUnit = 6;  // a multiple of kTileRows, whatever the instruction set
#endif
static_assert(kRowBlock % kRowUnit == 0 && kRowUnit % kTileRows == 0);

}  // namespace

const LinearKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, kRowUnit, stage, multiply, multiply_adds};

}  // namespace kvpage
