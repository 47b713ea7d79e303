// LinearKernel: products of rows with the rows of a weight, which is read where it lies. One thread computes a task.
//
//   out[m, n] = dot(x[m], w[n])           both run along K, so nothing is transposed
//
//             K in blocks of kMostK
//          ┌────────┬────────┬──────┐
//   x  m   │ kTileRows rows at a    │     a tile: kTileRows rows of x times kTileColumns rows of w, its sums in
//          │ time, in scratch       │     registers, vectors along K; the lanes are added at the end of a K block
//          └────────┴────────┴──────┘
//   w  n   │ kTileColumns rows      │     a tile of w stays in the first cache while all rows of x pass by
//
// A sum is taken in an order that depends on K alone. So a row's result is the same, bit by bit, whatever other rows
// there are, and however threads share them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "simd/kernel_family.h"

namespace kvpage {

constexpr int64_t kTileColumns = 4;    // rows of w
constexpr int64_t kPanelColumns = 64;  // of w, whose sums are kept while K's blocks are added
constexpr int64_t kMostK = 512;        // of a block
constexpr int64_t kPaddedK = 32;       // blocks are multiples of this
constexpr int64_t kRowGap = 32;        // elements after a row in scratch: rows lie in different sets of a cache

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
  int64_t num_rows;            // of x in all, which are the strides of its blocks
  int64_t first_row, end_row;  // of this task
  const std::byte *w, *up;     // up: of the gated form
  int64_t w_stride, up_stride;
  int64_t num_columns;         // of out: rows of w
  int64_t first_column, end_column;
  const std::byte* bias;  // [num_columns] or null
  std::byte* out;
  int64_t out_stride;
};

// What a thread needs beside a task. Sizes in floats; starts are multiples of 64 bytes.
struct LinearScratch {
  float* sums;  // [end_row - first_row, kPanelColumns]
  float* tile;  // [kTileColumns, row_size]
};

struct LinearKernel {
  const char* name;
  // Writes rows [first_row, end_row) of x, of `x_stride` bytes, to the place task.x.
  void (*stage)(const LinearTask& task, const std::byte* x, int64_t x_stride);
  void (*multiply)(const LinearTask& task, const LinearScratch& scratch);
  // Multiplies and adds in registers alone, so often: the bound of any product. Returns the number of operations.
  int64_t (*multiply_adds)(int64_t num_rounds);
};

const KernelFamily<LinearKernel>& linear_kernels();

KVPAGE_DECLARE_KERNELS(LinearKernel, linear_kernel);
#if defined(__x86_64__)
extern const LinearKernel linear_kernel_avx512bf16;
#endif
extern const LinearKernel linear_kernel_pairs_model;  // for tests: avx512bf16's loops in plain C++

}  // namespace kvpage
