// The tokens of a row that may be drawn, in order of their ids, as keys and weights. For files that are compiled once
// per instruction set.
#pragma once

#include <cmath>

#include "sampling/blocked_row.h"
#include "sampling/weighted_draw.h"

namespace kvpage {
namespace {

constexpr float kLeastScore = -87.0f;  // a token below it has a weight below 1.6e-38 of the likeliest one's: none

struct Candidates {
  int32_t* keys;
  Weights weights;  // by `weigh`
  int32_t* ids;     // null: the index is the id
  int64_t count;

  KeyList list(bool is_weighted) const { return {keys, is_weighted ? weights : Weights{}, padded_to_unit(count)}; }
};

// The scores of a row: the greatest logit and the temperature.
struct Scale {
  float top, temperature;

  Vec keys(Vec logits) const { return bit_cast<Vec>(bit_cast<IntVec>((logits - top) / temperature) & 0x7fffffff); }

  // Logits times this are logarithms of weights, to the base of 2.
  static float log2_factor(float temperature) { return kLog2E / temperature; }

  // Returns a logit that none with at least this score is below.
  float least_logit(float score) const {
    const double distance = static_cast<double>(score) * temperature * (1 + 0x1p-20);
    const double logit = std::fmax(top + distance, static_cast<double>(kLowestFinite));
    return std::fmax(std::nextafter(static_cast<float>(logit), -kInfinity), kLowestFinite);
  }
};

inline void pad(Candidates& found) {
  for (int64_t i = found.count; i < padded_to_run(padded_to_unit(found.count)); ++i) found.keys[i] = kNoKey;
}

// Fills the weights, from the keys.
inline void weigh(const Candidates& found) {
  constexpr int kNum = 2;
  const int64_t size = padded_to_run(padded_to_unit(found.count));
  for (int64_t i = 0; i < size; i += kNum * kLanes) {
    VecRow<kNum> row;
    row.each([&](Vec, int n) {
      const IntVec keys = load_keys(found.keys + i + n * kLanes);
      return bit_cast<Vec>(keys | static_cast<int32_t>(0x80000000)) * kLog2E;
    });
    raise_2_to<kFineBits>(row);
    for (int n = 0; n < kNum; ++n) {
      const int64_t at = i + n * kLanes;
      const IntVec is_token = load_keys(found.keys + at) != splat_key(kNoKey);
      const WeightVec weights = split_weight(row.at[n]);
      const IntVec coarse = is_token & weights.coarse, fine = is_token & weights.fine;
      std::memcpy(found.weights.coarse + at, &coarse, sizeof(coarse));
      std::memcpy(found.weights.fine + at, &fine, sizeof(fine));
    }
  }
}

// Takes all tokens of a row.
template <typename T>
Candidates all_candidates(const BlockedRow<T>& row, int64_t size, const Scale& scale, const SamplingScratch& scratch) {
  Candidates found{scratch.keys, scratch.weights, nullptr, size};
  for (int64_t block = 0; block < row.num_blocks(); ++block)
    row.with_block(block, [&](auto* from) {
      int32_t* to = scratch.keys + block * row.block_size();
      for (int64_t d = 0; d < row.block_size(); d += kLanes) {
        const Vec keys = scale.keys(load(from + d));
        std::memcpy(to + d, &keys, sizeof(keys));
      }
    });
  pad(found);
  return found;
}

// Appends the tokens of a block from a logit on. Keys are logits as yet.
template <typename U>
inline int64_t append_block(const U* from, int64_t block_size, int32_t first_id, float least, int32_t* keys,
                            int32_t* ids) {
  IntVec lane_ids;
  for (int lane = 0; lane < kLanes; ++lane) lane_ids[lane] = first_id + lane;
  int64_t count = 0;
  for (int64_t d = 0; d < block_size; d += kLanes, lane_ids += kLanes) {
    const Vec logits = load(from + d);
    const uint32_t bits = at_least_bits(logits, splat(least));
    store_packed(keys + count, logits, bits);
    store_packed(ids + count, lane_ids, bits);
    count += num_bits(bits);
  }
  return count;
}

// Takes the tokens of at least a score, and maybe some below it. maxima: of the row's groups.
template <typename T>
Candidates candidates_from(float score, const BlockedRow<T>& row, const Scale& scale, const float* maxima,
                           const SamplingScratch& scratch) {
  const float least = scale.least_logit(std::fmax(score, kLeastScore));
  Candidates found{scratch.keys, scratch.weights, scratch.ids, 0};
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (!at_least_bits(load(maxima + block * kLanes), splat(least))) continue;
    row.with_block(block, [&](auto* from) {
      const auto first_id = static_cast<int32_t>(block * row.block_size());
      found.count +=
          append_block(from, row.block_size(), first_id, least, found.keys + found.count, found.ids + found.count);
    });
  }
  for (int64_t i = 0; i < found.count; i += kLanes) {
    const Vec keys = scale.keys(bit_cast<Vec>(load_keys(found.keys + i)));
    std::memcpy(found.keys + i, &keys, sizeof(keys));
  }
  pad(found);
  return found;
}

}  // namespace
}  // namespace kvpage
