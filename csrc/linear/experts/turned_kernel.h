// TurnedKernel: products of rows with a weight that lies turned, [K, N]: as experts of some models keep theirs.
//
//                 N ─►
//   w  k ..       ═══════════   some rows of w at a time: few rows of x read them as they lie, more out of scratch
//   sums          [row, N]      sums[n] = (sums[n] + x[k] * w[k, n]) + x[k + 1] * w[k + 1, n] ...
//
// A sum is taken in the order of K, one number or a pair after the other. So a row's result is the same, bit by bit,
// whatever other rows there are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "simd/kernel_family.h"

namespace kvpage {

constexpr int64_t kTurnedRows = 48;      // of x at once
constexpr int64_t kTurnedColumns = 256;  // of a panel: a multiple of any vector
constexpr int64_t kTurnedPacked = 16384;  // words of w in scratch at once, in the second cache
constexpr int64_t kTurnedWord = 4;       // bytes of a word of x in scratch: a number, or a pair of them

// Strides in bytes, but that of x.
struct TurnedTask {
  RowType type;        // of w, bias and out
  const std::byte* x;  // scratch, as `stage` writes it: [num_rows, x_stride] words, at most kTurnedRows
  int64_t x_stride, num_rows, size;
  const std::byte* w;  // from the panel's first column on
  int64_t w_stride, num_columns;
  const std::byte* bias;  // likewise, or null
  std::byte* out;
  int64_t out_stride;
  float* sums;        // scratch [kTurnedRows, kTurnedColumns]
  std::byte* packed;  // scratch, kTurnedPacked words
};

struct TurnedKernel {
  const char* name;
  // Writes `count` elements of a row of x as words.
  void (*stage)(RowType type, const std::byte* from, int64_t count, std::byte* to);
  void (*multiply)(const TurnedTask& task);
};

const KernelFamily<TurnedKernel>& turned_kernels();

KVPAGE_DECLARE_KERNELS(TurnedKernel, turned_kernel);
#if defined(__x86_64__)
extern const TurnedKernel turned_kernel_avx512bf16;
#endif
extern const TurnedKernel turned_kernel_pairs_model;  // for tests: avx512bf16's loops in plain C++

}  // namespace kvpage
