// The body of LinearKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#pragma once

#include "linear/dot_tile_impl.h"
#include "linear/gate_impl.h"
#include "linear/linear_kernel.h"

namespace kvpage {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// --- rows of x in scratch ------------------------------------------------------------------------------------------

template <typename T>
void stage_typed(const LinearTask& task, const std::byte* x, int64_t x_stride) {
  const KBlocks& blocks = task.blocks;
  float* const staged = reinterpret_cast<float*>(const_cast<std::byte*>(task.x));
  for (int64_t row = task.first_row; row < task.end_row; ++row)
    for (int64_t block = 0; block < blocks.num_blocks; ++block) {
      const T* from = reinterpret_cast<const T*>(x + row * x_stride) + blocks.begin(block);
      float* to = staged + (block * task.num_rows + row) * blocks.block_size;
      for_each_vector(
          blocks.width(block), [&](int64_t k) { store(to + k, load(from + k)); },
          [&](int64_t k, int64_t count) { store(to + k, load_partial(from + k, count)); });
    }
}

// --- a panel: all K of some columns --------------------------------------------------------------------------------

// The columns of a panel in tiles. A tile of the gated form has half of its rows from each weight, so that both sums of
// a result are in one panel.
inline bool is_gated(const LinearTask& task) { return task.activation != Activation::kNone; }

template <typename T>
struct Panel {
  const LinearTask& task;
  int64_t first, end;  // columns of out

  static int64_t most_columns(const LinearTask& task) { return is_gated(task) ? kPanelColumns / 2 : kPanelColumns; }
  int64_t columns_per_tile() const { return is_gated(task) ? kTileColumns / 2 : kTileColumns; }
  int64_t num_tiles() const { return (end - first + columns_per_tile() - 1) / columns_per_tile(); }
  // Floats from the sums of a tile's lower half to those of its upper half.
  int64_t upper() const { return is_gated(task) ? kPanelColumns / 2 : kTileColumns / 2; }

  // Past the last column the last one is taken again: its sums are not used.
  Columns<T> columns(int64_t tile, int64_t k) const {
    Columns<T> found;
    for (int64_t j = 0; j < kTileColumns; ++j) {
      const bool is_up = is_gated(task) && j >= kTileColumns / 2;
      const int64_t column = first + tile * columns_per_tile() + (is_up ? j - kTileColumns / 2 : j);
      const std::byte* row =
          (is_up ? task.up : task.w) + least(column, end - 1) * (is_up ? task.up_stride : task.w_stride);
      found.rows[j] = reinterpret_cast<const T*>(row) + k;
    }
    return found;
  }
};

template <typename T>
void tile_of(int64_t num_rows, const Operands<T>& operands, const Sums& sums) {
  switch (num_rows) {
#if KVPAGE_LANES == 16
    case 6: return dot_tile<6>(operands, sums);
    case 5: return dot_tile<5>(operands, sums);
    case 4: return dot_tile<4>(operands, sums);
#endif
    case 3: return dot_tile<3>(operands, sums);
    case 2: return dot_tile<2>(operands, sums);
    default: return dot_tile<1>(operands, sums);
  }
}

// Rows of x in tiles of nearly the same height.
struct RowTiles {
  int64_t num, height, num_higher;

  explicit RowTiles(int64_t num_rows)
      : num((num_rows + kTileRows - 1) / kTileRows), height(num_rows / num), num_higher(num_rows % num) {}
  int64_t height_of(int64_t tile) const { return height + (tile < num_higher); }
};

// The rows of the next tile of w, fetched part by part while `num_parts` tiles of x pass.
template <typename T>
struct FetchParts {
  const Columns<T>& next;
  int64_t num_parts, num_fetched = 0, due = 0;

  Fetch part() {
    Fetch fetch{};
    for (due += kTileColumns; due >= num_parts; due -= num_parts)
      fetch.rows[fetch.count++] = reinterpret_cast<const std::byte*>(next.rows[num_fetched++]);
    return fetch;
  }
};

// Past the last whole vector of a K block: what is left of each row, with zeros after it.
template <typename T>
struct RowEnds {
  T elements[kTileColumns][kLanes];

  Columns<T> fill(const Columns<T>& columns, int64_t width) {
    const int64_t whole = width / kLanes * kLanes;
    Columns<T> ends;
    for (int64_t j = 0; j < kTileColumns; ++j) ends.rows[j] = elements[j];
    if (whole == width) return ends;
    std::memset(elements, 0, sizeof(elements));
    for (int64_t j = 0; j < kTileColumns; ++j)
      std::memcpy(elements[j], columns.rows[j] + whole, static_cast<size_t>(width - whole) * sizeof(T));
    return ends;
  }
};

// One tile of w with all rows of the task. 16-bit numbers are widened by the first tile of x, which keeps them.
template <typename T>
void multiply_tile(const LinearTask& task, const LinearScratch& scratch, int64_t block, const RowTiles& tiles,
                   const Columns<T>& columns, const Columns<T>& next, Sums sums) {
  const int64_t stride = task.blocks.block_size, width = task.blocks.width(block);
  RowEnds<T> ends;
  FetchParts<T> parts{next, tiles.num};
  Operands<T> operands{reinterpret_cast<const float*>(task.x) + (block * task.num_rows + task.first_row) * stride,
                       stride,
                       width,
                       columns,
                       ends.fill(columns, width),
                       {},
                       sizeof(T) < sizeof(float) && tiles.num > 1 ? scratch.tile : nullptr};
  int64_t tile = 0;
  const auto multiply_next = [&](auto& given) {
    const int64_t height = tiles.height_of(tile++);
    given.fetch = parts.part();
    tile_of(height, given, sums);
    given.x += height * stride;
    sums.data += height * kPanelColumns;
  };
  multiply_next(operands);
  if (!operands.kept) {
    while (tile < tiles.num) multiply_next(operands);
    return;
  }
  Operands<float> kept{operands.x, stride, width, {}, {}, {}, nullptr};
  for (int64_t j = 0; j < kTileColumns; ++j) {
    kept.columns.rows[j] = scratch.tile + j * stride;
    kept.ends.rows[j] = kept.columns.rows[j] + width / kLanes * kLanes;
  }
  while (tile < tiles.num) multiply_next(kept);
}

template <typename T>
void multiply_panel(const LinearTask& task, const LinearScratch& scratch, const RowTiles& tiles,
                    const Panel<T>& panel) {
  const int64_t num_tiles = panel.num_tiles(), num_blocks = task.blocks.num_blocks;
  for (int64_t block = 0; block < num_blocks; ++block)
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const bool is_last = tile + 1 == num_tiles;
      const Columns<T> columns = panel.columns(tile, task.blocks.begin(block));
      Columns<T> next = columns;
      if (!is_last) {
        next = panel.columns(tile + 1, task.blocks.begin(block));
      } else if (block + 1 < num_blocks) {
        next = panel.columns(0, task.blocks.begin(block + 1));
      } else if (panel.end < task.end_column) {
        next = Panel<T>{task, panel.end, task.end_column}.columns(0, 0);
      }
      const Sums sums{scratch.sums + tile * panel.columns_per_tile(), panel.upper(), block > 0};
      multiply_tile(task, scratch, block, tiles, columns, next, sums);
    }
}

template <typename T>
void multiply_typed(const LinearTask& task, const LinearScratch& scratch) {
  const RowTiles tiles(task.end_row - task.first_row);
  const int64_t most = Panel<T>::most_columns(task);
  for (int64_t column = task.first_column; column < task.end_column; column += most) {
    const Panel<T> panel{task, column, least(column + most, task.end_column)};
    if (task.blocks.num_blocks == 0) std::memset(scratch.sums, 0, (task.end_row - task.first_row) * kPanelColumns * 4);
    multiply_panel(task, scratch, tiles, panel);
    for (int64_t row = task.first_row; row < task.end_row; ++row) {
      T* to = reinterpret_cast<T*>(task.out + row * task.out_stride) + column;
      const T* bias = task.bias ? reinterpret_cast<const T*>(task.bias) + column : nullptr;
      finish_row(task.activation, scratch.sums + (row - task.first_row) * kPanelColumns, bias, panel.end - column, to);
    }
  }
}

void stage(const LinearTask& task, const std::byte* x, int64_t x_stride) {
  switch (task.type) {
    case RowType::kBfloat16: return stage_typed<Bf16>(task, x, x_stride);
    case RowType::kFloat16: return stage_typed<Fp16>(task, x, x_stride);
    default: return stage_typed<float>(task, x, x_stride);
  }
}

void multiply(const LinearTask& task, const LinearScratch& scratch) {
  switch (task.type) {
    case RowType::kBfloat16: return multiply_typed<Bf16>(task, scratch);
    case RowType::kFloat16: return multiply_typed<Fp16>(task, scratch);
    default: return multiply_typed<float>(task, scratch);
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

}  // namespace

const LinearKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, stage, multiply, multiply_adds};

}  // namespace kvpage
