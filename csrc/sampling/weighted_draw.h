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

// Returns the place of `part` of `whole` among `total`, below it. total: above 0.
inline int64_t target_of(double part, double whole, int64_t total) {
  const auto target = static_cast<int64_t>(part / whole * static_cast<double>(total));
  return target < total ? target : total - 1;
}

// Returns the first whose running sum exceeds the target, which is below their sum. before: the sum of those before it.
template <typename Mass>
inline int64_t first_past(const Mass* masses, int64_t target, int64_t& before) {
  int64_t at = 0;
  for (before = 0; before + masses[at] <= target; before += masses[at++]) {
  }
  return at;
}

// Returns the sum of the weights of a run whose keys are at most `last_key`.
inline int64_t run_sum(const KeyList& list, int64_t begin, int32_t last_key) {
  WeightVec sums = {};
  for (int64_t i = begin; i < begin + kRun; i += kLanes) {
    const IntVec stays = load_keys(list.keys + i) <= splat_key(last_key);
    sums.coarse += stays & load_keys(list.weights.coarse + i);
    sums.fine += stays & load_keys(list.weights.fine + i);
  }
  return sum_of(sums);
}

// Returns the index of the drawn weight among those whose keys are at most `last_key`, at a share of their sum.
// list: padded to whole runs with weights of 0. sums: [list.size / kRun], overwritten.
inline int64_t draw_share(const KeyList& list, int32_t last_key, double share, int64_t* sums) {
  int64_t total = 0;
  for (int64_t run = 0; run < list.size / kRun; ++run) total += sums[run] = run_sum(list, run * kRun, last_key);
  const int64_t target = target_of(share, 1, total);
  int64_t before;
  int64_t at = first_past(sums, target, before) * kRun;
  for (;; ++at) {
    if (list.keys[at] > last_key) continue;
    before += (int64_t{list.weights.coarse[at]} << kFineBits) + list.weights.fine[at];
    if (before > target) return at;
  }
}

}  // namespace
}  // namespace kvpage
