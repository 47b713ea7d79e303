// A row of logits cut into blocks, and the survey of it: one pass over memory. For files that are compiled once per
// instruction set.
//
//   block   | x0 x1 x2 x3 | x4 x5 x6 x7 | ...       a group: the logits of a block that share a lane
//   lanes     0  1  2  3    0  1  2  3
#pragma once

#include <limits>

#include "sampling/sampling_kernel.h"
#include "sampling/whole_weights.h"

namespace kvpage {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                kLowestFinite = std::numeric_limits<float>::lowest();
constexpr int kAtOnce = 4;  // registers; a block is a multiple of so many
constexpr int64_t kBlocksAtOnce = 8;  // so that no share waits for its block's top, and the next cache holds them

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

// The sum of a block's shares. size: at most 256, so that a lane's sum fits into 32 bits.
template <typename U>
inline int64_t block_shares(const U* from, int64_t size, float top, float factor) {
  WordVec sum = {};
  const Vec tops = splat(top > kLowestFinite ? top : kLowestFinite);
  for (int64_t d = 0; d < size; d += kAtOnce * kLanes) {
    VecRow<kAtOnce> row;
    row.each([&](Vec, int i) { return load(from + d + i * kLanes); });
    to_shares(row, tops, factor);
    for (const Vec shares : row.at) sum += bit_cast<WordVec>(whole(shares));
  }
  return sum_words(sum);
}

// The greatest of all lanes, as a tree.
inline float top_of(Vec a) {
#if KVPAGE_LANES == 16
  a = max(a, KVPAGE_SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  a = max(a, KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
#elif KVPAGE_LANES == 8
  a = max(a, KVPAGE_SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
  const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
  return low > high ? low : high;
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

// Writes the maximum of each group and, with kShares, the top of each block and the sum of its shares. factor: see
// shares_of.
template <bool kShares, typename T>
inline Survey survey(const BlockedRow<T>& row, float factor, const SamplingScratch& scratch) {
  Vec top = splat(-kInfinity);
  IntVec magnitudes = {};
  for (int64_t begin = 0; begin < row.num_blocks(); begin += kBlocksAtOnce) {
    const int64_t end = begin + kBlocksAtOnce < row.num_blocks() ? begin + kBlocksAtOnce : row.num_blocks();
    for (int64_t block = begin; block < end; ++block) {
      const Vec lanes =
          row.with_block(block, [&](auto* from) { return block_maxima(from, row.block_size(), magnitudes); });
      store(scratch.maxima + block * kLanes, lanes);
      top = max(lanes, top);
      if constexpr (kShares) scratch.tops[block] = top_of(lanes);
    }
    for (int64_t block = begin; kShares && block < end; ++block)
      scratch.masses[block] = row.with_block(
          block, [&](auto* from) { return block_shares(from, row.block_size(), scratch.tops[block], factor); });
  }
  const float greatest = max_lanes(top);
  return {is_usable(greatest, magnitudes), greatest};
}

}  // namespace
}  // namespace kvpage
