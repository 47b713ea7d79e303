// Rows of tokens on their way into a blend: each is taken from where it was cached, and rotated to its new position, or
// from those computed afresh. One pass over memory, for adjacent rows and for rows in blocks.
//
//   fresh_rows   [ -1 | -1 |  0 | -1 |  1 ]        fresh [ 0 | 1 ]
//   to           [  r    r    f    r    f ]        r: from's row, rotated (or copied);  f: fresh's
#pragma once

#include <cstdint>

#include "blend/blend_kernel.h"

namespace kvpage {

// [num_rows, num_heads, size], strides in bytes; or the slots of blocks, in any order: slot = block * block_size +
// offset.
struct RowPlace {
  std::byte* base;
  int64_t row_stride, head_stride;  // row_stride: with slots from offset to offset
  const int64_t* slots;  // null: row i is the i-th
  int64_t num_blocks, block_size, block_stride;

  Heads row(int64_t i) const {
    if (!slots) return {base + i * row_stride, head_stride};
    return {base + slots[i] / block_size * block_stride + slots[i] % block_size * row_stride, head_stride};
  }
};

struct MixRows {
  RowPlace from, to, fresh;
  const int64_t* fresh_rows;  // [num_rows], the fresh row that takes a row's place, or -1; null for none
  int64_t num_fresh;
  RowType type;
  int64_t num_rows, num_heads, size;
  RotatedShape rotated;
  const float *cos, *sin;  // [num_rows, rotated.num_pairs]; null: rows are copied
  int max_threads;
  const BlendKernel* kernel;
};

// A row whose slot in `to` is -1 is skipped. `to` may be `from`, row by row; else they share no memory. Throws
// InvalidArgument for slots and fresh rows out of range, before anything is written.
void mix_rows(const MixRows& args);

struct RowDeviation {
  RowPlace a, b;  // without slots
  const uint8_t* valid;  // [num_rows]
  float* out;  // [num_rows]: the mean of a row's squared differences; 0 where it is not valid, and not read
  RowType type;
  int64_t num_rows, num_heads, size;
  int max_threads;
  const BlendKernel* kernel;
};

void row_deviation(const RowDeviation& args);

}  // namespace kvpage
