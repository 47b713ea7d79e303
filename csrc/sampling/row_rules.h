// RowRules: the numbers by which one row's token is chosen. kvpage/layout/sampling_record.py declares them, and says
// what they mean. Another form than there is refused when kvpage is imported.
#pragma once

#include <cstdint>

namespace kvpage {

struct RowRules {
  uint64_t seed;
  int64_t position, top_k;
  double top_p;
  float temperature, least_score;
};

}  // namespace kvpage
