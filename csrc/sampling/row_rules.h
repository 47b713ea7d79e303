// RowRules: the numbers by which one row's token is chosen. numpy records of kvpage.serving.sampling.native_rows have
// this form.
#pragma once

#include <cstdint>

namespace kvpage {

struct RowRules {
  uint64_t seed;
  int64_t position;   // of the draw: how many tokens were generated before
  int64_t top_k;      // 0: all
  double top_p;       // 1: all
  float temperature;  // 0: the likeliest token is taken
  float least_score;  // the logarithm of min_p; -inf: all
};
static_assert(sizeof(RowRules) == 40);

}  // namespace kvpage
