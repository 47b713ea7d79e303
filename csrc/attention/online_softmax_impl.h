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

// Lanes from `distance` on take the place of the first ones.
template <int kDistance>
inline Vec upper_lanes(Vec a) {
#if KVPAGE_LANES == 16
  if constexpr (kDistance == 8) return KVPAGE_SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  return KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
#elif KVPAGE_LANES == 8
  return KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 4, 5, 6, 7);
#else
  return a;
#endif
}

struct Sum {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};

struct Largest {
  Vec operator()(Vec a, Vec b) const { return max(a, b); }
  float operator()(float a, float b) const { return a > b ? a : b; }
};

// All lanes of a vector together, as a tree.
template <typename Combine>
inline float combine_lanes(Vec a, const Combine& combine) {
  if constexpr (kLanes == 16) a = combine(a, upper_lanes<8>(a));
  if constexpr (kLanes >= 8) a = combine(a, upper_lanes<4>(a));
  return combine(combine(a[0], a[1]), combine(a[2], a[3]));
}

// The same of kLanes rows at once, by the same tree: lane r is of row r.
template <typename Combine>
inline Vec combine_rows(const float (&rows)[kLanes][kLanes], const Combine& combine) {
  const std::byte* pointers[kLanes];
  for (int r = 0; r < kLanes; ++r) pointers[r] = reinterpret_cast<const std::byte*>(rows[r]);
  Vec columns[kLanes];
  load_turned(pointers, 0, columns);
  for (int half = kLanes / 2; half >= 4; half /= 2)
    for (int c = 0; c < half; ++c) columns[c] = combine(columns[c], columns[c + half]);
  return combine(combine(columns[0], columns[1]), combine(columns[2], columns[3]));
}

inline bool is_empty(const TileRange& range) { return range.first >= range.last; }

inline void start(const AttentionState& state, int64_t row, int64_t num_rows, int64_t stride) {
  for (int64_t i = row * stride; i < (row + num_rows) * stride; i += kLanes) store(state.sums + i, Vec{});
  for (int64_t i = row; i < row + num_rows; ++i) state.weights[i] = 0, state.maxima[i] = kLowest;
}

// In the vectors that have a key which a row sees, scores of other keys become the lowest, and weigh nothing.
inline void mask_scores(float* scores, TileRange seen) {
  for (int32_t j = seen.first / kLanes * kLanes; j < seen.first; ++j) scores[j] = kLowest;
  for (int32_t j = seen.last; j % kLanes != 0; ++j) scores[j] = kLowest;
}

// A score is a product of a query and a key, scaled and capped.
struct ScoreRule {
  float scale, softcap;  // softcap 0: none

  // Whether scores are the products by a factor that keeps their order.
  bool is_factor() const { return softcap <= 0 && scale > 0; }

  Vec operator()(Vec product) const {
    const Vec score = product * scale;
    return softcap > 0 ? softcap * tanh(score / softcap) : score;
  }
};

// call(j) for the vectors of a row that have a key it sees. Of a whole tile their number is a constant.
template <typename Call>
inline void for_vectors(TileRange seen, const Call& call) {
  if (seen.first == 0 && seen.last == kTileKeys) {
    for (int32_t j = 0; j < kTileKeys; j += kLanes) call(j);
    return;
  }
  for (int32_t j = seen.first / kLanes * kLanes; j < seen.last; j += kLanes) call(j);
}

// Turns the products of a row into scores, where a factor does not do.
inline void apply_rule(float* scores, TileRange seen, const ScoreRule& rule) {
  if (is_empty(seen)) return;
  for_vectors(seen, [&](int32_t j) { store(scores + j, rule(load(scores + j))); });
}

// Returns the largest score of each lane, which are `scores` by `factor`.
inline Vec largest_scores(float* scores, TileRange seen, float factor) {
  if (is_empty(seen)) return splat(kLowest);
  mask_scores(scores, seen);
  Vec top = splat(kLowest);
  for_vectors(seen, [&](int32_t j) { top = max(top, load(scores + j)); });
  return top * factor;
}

// Writes weight j of a row, whose words are over its scores. Returns what it is worth there: bf16 rounds it.
inline Vec store_weights(float* row, int64_t j, Vec weights, float) {
  store(row + j, weights);
  return weights;
}

inline Vec store_weights(float* row, int64_t j, Vec weights, Pair) {
  Bf16* const to = reinterpret_cast<Bf16*>(row) + j;
  const HalfVec rounded = round_to_bf16(weights);  // exp2_negative gives no subnormal number
  std::memcpy(to, &rounded, sizeof(rounded));
  return load(reinterpret_cast<const Bf16*>(&rounded));
}

// The lesser of x and 0, lane by lane; NaN stays.
inline Vec at_most_zero(Vec x) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_maskz_min_ps(0xffff, __m512{}, bit_cast<__m512>(x)));
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  return bit_cast<Vec>(_mm256_min_ps(__m256{}, bit_cast<__m256>(x)));
#elif KVPAGE_LANES == 4 && defined(__SSE2__)
  return bit_cast<Vec>(_mm_min_ps(__m128{}, bit_cast<__m128>(x)));
#else
  return x > 0 ? Vec{} : x;
#endif
}

// Turns a row's scores, by `factor`, into weights relative to `maximum`. Returns their total in each lane.
template <typename Word>
inline Vec weigh_scores(float* scores, TileRange seen, float factor, float maximum) {
  if (is_empty(seen)) return Vec{};
  const float base = maximum == kLowest ? 0.0f : maximum;
  Vec total = {};
  for_vectors(seen, [&](int32_t j) {
    // Rounded as one, the product and the difference may be above 0 where both by themselves are not.
    const Vec below = at_most_zero(load(scores + j) * factor - base);
    total += store_weights(scores, j, exp2_negative(below), Word{});
  });
  return total;
}

// combined[r]: combine_lanes of lanes_of(r), for rows that are each row of its own, or kLanes of them at once: the
// result is the same.
template <typename Combine, typename LanesOf>
inline void combine_each(int64_t num_rows, const Combine& combine, const LanesOf& lanes_of, float* combined) {
  int64_t r = 0;
  for (; r + kLanes <= num_rows; r += kLanes) {
    float rows[kLanes][kLanes];
    for (int i = 0; i < kLanes; ++i) store(rows[i], lanes_of(r + i));
    store(combined + r, combine_rows(rows, combine));
  }
  for (; r < num_rows; ++r) combined[r] = combine_lanes(lanes_of(r), combine);
}

// Raises the maxima to the largest scores of a tile, which are in `factors`. Leaves there what the sums so far are to
// be multiplied by.
inline void raise_maxima(int64_t num_rows, float* maxima, float* factors) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const float before = maxima[r], top = factors[r] > before ? factors[r] : before;
    factors[r] = top != before ? before - top : 0.0f;  // equal ones may be -inf, whose difference is no number
    maxima[r] = top;
  }
  for (int64_t r = num_rows; r % kLanes != 0; ++r) factors[r] = 0;
  for (int64_t r = 0; r < num_rows; r += kLanes) store(factors + r, exp2_negative(load(factors + r)));
}

// Products of a tile to weights, in words. Sums, weights and maxima of the rows are of the new maxima afterwards;
// `factors` and `totals` have room for num_rows, padded.
template <typename Word>
inline void soften_rows(Rows scores, int64_t num_rows, const TileRange* seen, const ScoreRule& rule,
                        const AttentionState& state, int64_t row, int64_t stride, float* factors, float* totals) {
  float *maxima = state.maxima + row, *weights = state.weights + row;
  const float factor = rule.is_factor() ? rule.scale : 1.0f;
  if (!rule.is_factor())
    for (int64_t r = 0; r < num_rows; ++r) apply_rule(scores[r], seen[r], rule);
  combine_each(num_rows, Largest{}, [&](int64_t r) { return largest_scores(scores[r], seen[r], factor); }, factors);
  raise_maxima(num_rows, maxima, factors);
  const auto weigh = [&](int64_t r) { return weigh_scores<Word>(scores[r], seen[r], factor, maxima[r]); };
  combine_each(num_rows, Sum{}, weigh, totals);
  for (int64_t r = 0; r < num_rows; ++r) {
    weights[r] = weights[r] * factors[r] + totals[r];
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
