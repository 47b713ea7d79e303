// The online softmax of rows, for the body of AttentionKernel: scores of a tile become weights relative to the largest
// score so far, and the sums so far follow it. All scores are multiplied by log2(e), and weights are powers of two.
#pragma once

#include <limits>

#include "attention/attention_kernel.h"
#include "attention/tile_products_impl.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max(), kLog2E = 1.44269504f;

// A factor of scores, in units of log2; finite as it was.
inline float in_log2(float x) {
  const float scaled = x * kLog2E;
  return scaled > kLargest ? kLargest : scaled < -kLargest ? -kLargest : scaled;
}

// The largest lane, and the sum of all, as a tree.
inline float largest_lane(Vec a) {
#if KVPAGE_LANES == 16
  a = max(a, KVPAGE_SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  a = max(a, KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
#elif KVPAGE_LANES == 8
  a = max(a, KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 4, 5, 6, 7));
#endif
  const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
  return low > high ? low : high;
}

inline float total_of_lanes(Vec a) {
#if KVPAGE_LANES == 16
  a += KVPAGE_SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  a += KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
#elif KVPAGE_LANES == 8
  a += KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 4, 5, 6, 7);
#endif
  return (a[0] + a[1]) + (a[2] + a[3]);
}

inline bool is_empty(const TileRange& range) { return range.first >= range.last; }

inline void start(const AttentionState& state, int64_t row, int64_t num_rows, int64_t stride) {
  for (int64_t i = row * stride; i < (row + num_rows) * stride; i += kLanes) store(state.sums + i, Vec{});
  for (int64_t i = row; i < row + num_rows; ++i) state.weights[i] = 0, state.maxima[i] = kLowest;
}

// The vectors of a row's scores that have a key it sees. Scores of others in there become the lowest, and weigh
// nothing.
inline TileRange mask_scores(float* scores, TileRange seen) {
  const TileRange vectors{seen.first / kLanes * kLanes, (seen.last + kLanes - 1) / kLanes * kLanes};
  for (int32_t j = vectors.first; j < seen.first; ++j) scores[j] = kLowest;
  for (int32_t j = seen.last; j < vectors.last; ++j) scores[j] = kLowest;
  return vectors;
}

// Caps and masks the scores of a row. Returns the largest of them and of `maximum`.
inline float largest_score(float* scores, TileRange seen, float softcap, float maximum) {
  if (softcap > 0)
    for (int32_t j = seen.first / kLanes * kLanes; j < seen.last; j += kLanes)
      store(scores + j, softcap * tanh(load(scores + j) / softcap));
  const TileRange vectors = mask_scores(scores, seen);
  Vec top = splat(maximum);
  for (int32_t j = vectors.first; j < vectors.last; j += kLanes) top = max(top, load(scores + j));
  return largest_lane(top);
}

// Turns a row's scores into weights relative to `maximum`. Returns their total.
inline float weigh_scores(float* scores, TileRange seen, float maximum) {
  const float base = maximum == kLowest ? 0.0f : maximum;
  Vec total = {};
  for (int32_t j = seen.first / kLanes * kLanes; j < seen.last; j += kLanes) {
    const Vec weights = exp2_negative(load(scores + j) - base);
    store(scores + j, weights);
    total += weights;
  }
  return total_of_lanes(total);
}

// Scores of a tile to weights. Sums, weights and maxima of the rows are of the new maxima afterwards; `factors` has
// room for num_rows, padded.
inline void soften_rows(Rows scores, int64_t num_rows, const TileRange* seen, float softcap,
                        const AttentionState& state, int64_t row, int64_t stride, float* factors) {
  for (int64_t r = 0; r < num_rows; ++r) {
    factors[r] = 0;
    if (is_empty(seen[r])) continue;
    float& maximum = state.maxima[row + r];
    const float top = largest_score(scores[r], seen[r], softcap, maximum);
    if (top != maximum) factors[r] = maximum - top;
    maximum = top;
  }
  for (int64_t r = num_rows; r % kLanes != 0; ++r) factors[r] = 0;
  for (int64_t r = 0; r < num_rows; r += kLanes) store(factors + r, exp2_negative(load(factors + r)));
  for (int64_t r = 0; r < num_rows; ++r) {
    if (is_empty(seen[r])) continue;
    const float total = weigh_scores(scores[r], seen[r], state.maxima[row + r]);
    state.weights[row + r] = state.weights[row + r] * factors[r] + total;
    float* sums = state.sums + (row + r) * stride;
    if (factors[r] != 1.0f)
      for (int64_t d = 0; d < stride; d += kLanes) store(sums + d, load(sums + d) * factors[r]);
  }
}

// 2**(maximum - top), 0 for a row that has seen no key, also when no row has.
inline float weight_of(float maximum, float top) { return maximum == kLowest ? 0.0f : std::exp2(maximum - top); }

// Adds what rows of `from` have seen to `to`. One copy of the code, so that it rounds alike for every caller.
__attribute__((noinline)) void merge_rows(const AttentionState& to, const AttentionState& from, int64_t row,
                                          int64_t num_rows, int64_t stride) {
  for (int64_t i = row; i < row + num_rows; ++i) {
    if (from.weights[i] == 0 && from.maxima[i] == kLowest) continue;
    const bool is_first = to.weights[i] == 0 && to.maxima[i] == kLowest;
    const float top = from.maxima[i] > to.maxima[i] ? from.maxima[i] : to.maxima[i];
    const float mine = is_first ? 0.0f : weight_of(to.maxima[i], top);
    const float theirs = is_first ? 1.0f : weight_of(from.maxima[i], top);
    for (int64_t d = i * stride; d < (i + 1) * stride; d += kLanes)
      store(to.sums + d, load(to.sums + d) * mine + load(from.sums + d) * theirs);
    to.weights[i] = to.weights[i] * mine + from.weights[i] * theirs;
    to.maxima[i] = is_first ? from.maxima[i] : top;
  }
}

}  // namespace
}  // namespace kvpage
