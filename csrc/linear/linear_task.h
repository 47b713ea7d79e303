// LinearTask: some rows times some columns of a weight, and LinearKernel, which computes it on one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"

namespace kvpage {

constexpr int64_t kTileColumns = 4;    // rows of w
constexpr int64_t kPanelColumns = 64;  // of w, whose sums are kept while K's blocks are added
constexpr int64_t kRowBlock = 96;  // rows of x of a task, at most: they stay in the second cache while a panel passes
constexpr int64_t kMostK = 512;  // of a block
constexpr int64_t kPaddedK = 32;  // blocks are multiples of this
constexpr int64_t kRowGap = 32;  // elements after a row in scratch: rows lie in different sets of a cache

enum class Activation { kNone, kSilu, kGeluTanh };  // with one: out = act(x @ w.T) * (x @ up.T)

// K as blocks of one size, the last of them shorter. A block's rows lie one after the other in scratch.
struct KBlocks {
  int64_t size, block_size, num_blocks;

  explicit KBlocks(int64_t k)
      : size(k),
        block_size(k == 0 ? 0 : round_up(divide_up(k, divide_up(k, kMostK)))),
        num_blocks(k == 0 ? 0 : divide_up(k, block_size)) {}

  int64_t row_size() const { return block_size + kRowGap; }  // in scratch
  int64_t begin(int64_t block) const { return block * block_size; }
  int64_t width(int64_t block) const { return block + 1 < num_blocks ? block_size : size - begin(block); }

 private:
  static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static int64_t round_up(int64_t a) { return divide_up(a, kPaddedK) * kPaddedK; }
};

// Strides in bytes. `x` is scratch: [K block][num_rows][row_size], as `stage` writes it.
struct LinearTask {
  RowType type;  // of w, bias and out
  Activation activation;
  KBlocks blocks;
  const std::byte* x;
  int64_t num_rows;  // of x in all, which are the strides of its blocks
  int64_t first_row, end_row;  // of this task
  const std::byte *w, *up;  // up: of the gated form
  int64_t w_stride, up_stride;
  int64_t num_columns;  // of out: rows of w
  int64_t first_column, end_column;
  const std::byte* bias;  // [num_columns] or null
  std::byte* out;
  int64_t out_stride;
};

// What a thread needs beside a task. Sizes in floats; starts are multiples of 64 bytes.
struct LinearScratch {
  float* sums;  // [end_row - first_row, kPanelColumns]; of a product by tiles [kPanelColumns, kRowBlock]
  float* tile;  // kTileScratch
};

// A part of a weight: [kTileColumns, row_size] in fp32, or 32 rows of a K block in bf16.
constexpr int64_t kTileScratch = 32 * kMostK / 2;
static_assert(kTileScratch >= kTileColumns * (kMostK + kRowGap));

struct LinearKernel {
  const char* name;
  int64_t row_unit;  // tasks begin at a multiple of it, of the rows in scratch
  // Writes rows [first_row, end_row) of x, of `x_stride` bytes, to the place task.x.
  void (*stage)(const LinearTask& task, const std::byte* x, int64_t x_stride);
  void (*multiply)(const LinearTask& task, const LinearScratch& scratch);
  // Multiplies and adds in registers alone, so often: the bound of any product. Returns the number of operations.
  int64_t (*multiply_adds)(int64_t num_rounds);
};

}  // namespace kvpage
