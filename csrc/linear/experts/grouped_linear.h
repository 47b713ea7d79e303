// grouped_linear: rows in groups, each times the weight of its group, over threads: the experts of a model.
#pragma once

#include "linear/experts/turned_kernel.h"
#include "linear/linear.h"

namespace kvpage {

// A weight of each group, [num_columns, size]; or turned, [size, num_columns]. Strides in bytes.
struct GroupWeights {
  std::byte* data;
  int64_t group_stride, row_stride;
};

struct GroupedLinear {
  Matrix x, out;
  const int64_t* rows;  // the row of x that each row of out is made of
  const int64_t* ends;  // of each group's rows of out, ascending
  GroupWeights w, up;   // up: with an activation, not turned
  const std::byte* bias;  // [num_groups, num_columns], or null; not with an activation
  int64_t num_x_rows, num_groups, num_columns, size;
  RowType type;
  Activation activation;
  bool is_turned;
  int max_threads;
  const LinearKernel* kernel;
  const TurnedKernel* turned;
};

// `out` shares no memory with the others. Rows after the last group's stay as they are. Throws InvalidArgument before
// anything is written.
void grouped_linear(const GroupedLinear& args);

}  // namespace kvpage
