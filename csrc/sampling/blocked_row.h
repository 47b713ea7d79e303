// A row of logits cut into blocks, and the survey of it: one pass over memory. For files that are compiled once per
// instruction set.
//
//   block   | x0 x1 x2 x3 | x4 x5 x6 x7 | ...       a group: the logits of a block that share a lane
//   lanes     0  1  2  3    0  1  2  3
#pragma once

#include <limits>

#include "sampling/sampling_kernel.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                kLowestFinite = std::numeric_limits<float>::lowest();
constexpr int kAtOnce = 4;  // registers; a block is a multiple of so many

// Returns a register of logits; past `rest` of them, -inf.
template <typename T>
inline Vec load_or_lowest(const T* from, int64_t rest) {
  if (rest >= kLanes) return load(from);
  float logits[kLanes];
  store(logits, load_partial(from, rest));
  for (int64_t lane = rest; lane < kLanes; ++lane) logits[lane] = -kInfinity;
  return load(logits);
}

template <typename T>
class BlockedRow {
 public:
  // block_size: a multiple of SamplingScratch::kLeastBlock. tail: [block_size], for a last block that is not whole.
  BlockedRow(const LogitsRow& row, int64_t block_size, float* tail)
      : data_(reinterpret_cast<const T*>(row.data)),
        block_size_(block_size),
        num_blocks_((row.size + block_size - 1) / block_size),
        tail_(row.size % block_size ? tail : nullptr) {
    if (!tail_) return;
    const int64_t begin = (num_blocks_ - 1) * block_size, count = row.size - begin;
    for (int64_t d = 0; d < count; d += kLanes) store(tail + d, load_or_lowest(data_ + begin + d, count - d));
    for (int64_t d = (count + kLanes - 1) / kLanes * kLanes; d < block_size; ++d) tail[d] = -kInfinity;
  }

  int64_t block_size() const { return block_size_; }
  int64_t num_blocks() const { return num_blocks_; }

  // Returns use(logits) for a whole block of logits, of type T or fp32.
  template <typename Use>
  auto with_block(int64_t block, const Use& use) const {
    if (tail_ && block + 1 == num_blocks_) return use(static_cast<const float*>(tail_));
    return use(data_ + block * block_size_);
  }

 private:
  const T* data_;
  int64_t block_size_, num_blocks_;
  const float* tail_;
};

// The maximum of each lane. `magnitudes` grows to the greatest bits of a logit without its sign: a NaN's are greatest.
template <typename U>
inline Vec block_maxima(const U* from, int64_t size, IntVec& magnitudes) {
  Vec tops[kAtOnce];
  IntVec greatest[kAtOnce];
  for (int i = 0; i < kAtOnce; ++i) tops[i] = splat(-kInfinity), greatest[i] = magnitudes;
  for (int64_t d = 0; d < size; d += kAtOnce * kLanes)
    for (int i = 0; i < kAtOnce; ++i) {
      const Vec logits = load(from + d + i * kLanes);
      const IntVec bits = bit_cast<IntVec>(logits) & 0x7fffffff;
      tops[i] = max(logits, tops[i]);
      greatest[i] = bits > greatest[i] ? bits : greatest[i];
    }
  for (int i = 1; i < kAtOnce; ++i) greatest[0] = greatest[i] > greatest[0] ? greatest[i] : greatest[0];
  magnitudes = greatest[0];
  return max(max(tops[0], tops[1]), max(tops[2], tops[3]));
}

// The sum of the weights of each lane, relative to a top of each lane.
template <typename U>
inline Vec block_weights(const U* from, int64_t size, Vec tops, float factor) {
  Vec sums[kAtOnce] = {};
  for (int64_t d = 0; d < size; d += kAtOnce * kLanes)
    for (int i = 0; i < kAtOnce; ++i) sums[i] += exp2_negative((load(from + d + i * kLanes) - tops) * factor);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Returns whether a row with this maximum has a token to choose. magnitudes: of all of its blocks.
inline bool is_usable(float top, IntVec magnitudes) {
  int32_t greatest = 0;
  for (int lane = 0; lane < kLanes; ++lane) greatest = magnitudes[lane] > greatest ? magnitudes[lane] : greatest;
  return greatest <= 0x7f800000 && top > -kInfinity && top < kInfinity;
}

struct Survey {
  bool is_usable;
  float top;
};

// Writes the maximum of each group and, with kSums, its sum of weights, relative to that maximum. factor: by which
// logits become logarithms of weights, to the base of 2.
template <bool kSums, typename T>
inline Survey survey(const BlockedRow<T>& row, float factor, float* maxima, float* sums) {
  Vec top = splat(-kInfinity);
  IntVec magnitudes = {};
  for (int64_t block = 0; block < row.num_blocks(); ++block)
    row.with_block(block, [&](auto* from) {
      const Vec lanes = block_maxima(from, row.block_size(), magnitudes);
      store(maxima + block * kLanes, lanes);
      top = max(lanes, top);
      if constexpr (kSums)
        store(sums + block * kLanes, block_weights(from, row.block_size(), max(lanes, splat(kLowestFinite)), factor));
    });
  const float greatest = max_lanes(top);
  return {is_usable(greatest, magnitudes), greatest};
}

}  // namespace
}  // namespace kvpage
