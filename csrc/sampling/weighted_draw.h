// Draws of one of several weights. For files that are compiled once per instruction set.
//
//   weights   |--a--|b|------c------|d|     the first whose running sum exceeds the target
//                            ^ target       sums of runs first, then the weights of one run
#pragma once

#include "sampling/key_selection.h"

namespace kvpage {
namespace {

constexpr int64_t kRun = 32;  // weights; lists are padded to whole runs

inline int64_t padded_to_run(int64_t size) { return (size + kRun - 1) / kRun * kRun; }

// Returns the sum of the weights of a run whose keys are at most `last_key`.
inline float run_sum(const int32_t* keys, const float* weights, int32_t last_key) {
  Vec sum = {};
  for (int64_t i = 0; i < kRun; i += kLanes) {
    const IntVec stays = load_keys(keys + i) <= splat_key(last_key);
    sum += bit_cast<Vec>(stays & bit_cast<IntVec>(load(weights + i)));
  }
  return total_of(sum);
}

// Returns the index in a run. Where rounding leaves the target past the end: of the last weight above 0.
inline int64_t draw_in_run(const int32_t* keys, const float* weights, int32_t last_key, double target) {
  int64_t last = 0;
  double sum = 0;
  for (int64_t i = 0; i < kRun; ++i) {
    if (keys[i] > last_key || !(weights[i] > 0)) continue;
    sum += weights[i], last = i;
    if (sum > target) return i;
  }
  return last;
}

// Returns the index of the drawn weight among those whose keys are at most `last_key`, at a share of their sum.
// size: of the lists, padded to whole runs with weights of 0. sums: [size / kRun], overwritten.
inline int64_t draw_share(const int32_t* keys, const float* weights, int64_t size, int32_t last_key, double share,
                          float* sums) {
  const int64_t num_runs = size / kRun;
  double total = 0;
  for (int64_t run = 0; run < num_runs; ++run) {
    sums[run] = run_sum(keys + run * kRun, weights + run * kRun, last_key);
    total += sums[run];
  }
  const double target = share * total;
  double before = 0;
  int64_t run = 0, last = 0;
  for (; run < num_runs; before += sums[run++]) {
    if (sums[run] > 0) last = run;
    if (before + sums[run] > target) break;
  }
  const bool is_found = run < num_runs;
  const int64_t at = (is_found ? run : last) * kRun;
  return at + draw_in_run(keys + at, weights + at, last_key, is_found ? target - before : total);
}

}  // namespace
}  // namespace kvpage
