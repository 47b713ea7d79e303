// TurnedKernel: products of rows with a weight that lies turned, [K, N]: as experts of some models keep theirs.
//
//                 N ─►
//   w  k .. k+8   ═══════════   kTurnedDepth rows of w at a time, read as they lie
//   sums          [row, N]      in the first cache: sums[n] = (sums[n] + x[k] * w[k, n]) + x[k + 1] * w[k + 1, n] ...
//
// A sum is taken in the order of K. So a row's result is the same, bit by bit, whatever other rows there are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "simd/kernel_family.h"

namespace kvpage {

constexpr int64_t kTurnedRows = 24;      // of x at once
constexpr int64_t kTurnedColumns = 256;  // of a panel: a multiple of any vector

// Strides in bytes, but that of x.
struct TurnedTask {
  RowType type;    // of w, bias and out
  const float* x;  // [num_rows, size], at most kTurnedRows
  int64_t x_stride, num_rows, size;
  const std::byte* w;  // from the panel's first column on
  int64_t w_stride, num_columns;
  const std::byte* bias;  // likewise, or null
  std::byte* out;
  int64_t out_stride;
  float* sums;  // scratch [kTurnedRows, kTurnedColumns]
};

struct TurnedKernel {
  const char* name;
  void (*widen)(RowType type, const std::byte* from, int64_t count, float* to);
  void (*multiply)(const TurnedTask& task);
};

const KernelFamily<TurnedKernel>& turned_kernels();

KVPAGE_DECLARE_KERNELS(TurnedKernel, turned_kernel);

}  // namespace kvpage
