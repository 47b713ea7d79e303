// linear: rows times a weight, over threads.
#pragma once

#include "linear/linear_kernel.h"

namespace kvpage {

// A matrix of rows; the elements of a row are one run of memory. Stride in bytes.
struct Matrix {
  std::byte* data;
  int64_t row_stride;
};

// out = x @ w.T + bias, or activation(x @ w.T) * (x @ up.T).
struct Linear {
  Matrix x, w, up, out;  // up: with an activation
  const std::byte* bias;  // or null
  int64_t num_rows, num_columns, size;  // M, N, K
  RowType type;
  Activation activation;
  int max_threads;
  const LinearKernel* kernel;
};

// `out` shares no memory with the others. Throws InvalidArgument before anything is written.
void linear(const Linear& args);

}  // namespace kvpage
