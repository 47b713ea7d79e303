// rms_norm: rows normalised, over threads.
#pragma once

#include "linear/linear.h"
#include "linear/norms/norm_kernel.h"

namespace kvpage {

struct RmsNorm {
  Matrix x, residual, sum, out;  // residual.data and sum.data are null without a residual
  const std::byte* weight;       // [size]
  int64_t num_rows, size;
  RowType type;
  float eps, offset;
  NormOrder order;
  int max_threads;
  const NormKernel* kernel;
};

// Throws InvalidArgument before anything is written.
void rms_norm(const RmsNorm& args);

}  // namespace kvpage
