// Weights of tokens as whole numbers: their sums are the same in every order, so on every instruction
// set and device. For files that are compiled once per instruction set, without contraction to fused products and sums.
//
//   share    2**25 * e**((logit - its block's greatest) / temperature), cut off after the point
//   weight   2**34 * e**score, cut off after the point
#pragma once

#include "simd/vectors.h"

namespace kvpage {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr int kShareBits = 25;
constexpr int kFineBits = 17;  // half of a weight's

// Several registers, whose chains of operations a processor works on at the same time.
template <int kNum>
struct VecRow {
  Vec at[kNum];

  template <typename Change>
  void each(const Change& change) {
    for (int i = 0; i < kNum; ++i) at[i] = change(at[i], i);
  }
};

// Turns each x <= 0 into 2**(x + kExponent), within 2 units in the last place; about 2**kExponent * 2**-126 below -126.
// 2**x = 2**n * 2**r with n = round(x). The polynomial is at most 9.2e-8 off. Each product and sum rounds by itself.
template <int kExponent, int kNum>
inline void raise_2_to(VecRow<kNum>& x) {
  constexpr float kLowest = -126.0f,
                  kRound = 12582912.0f + 127.0f + kExponent;  // adding it leaves the exponent's bits lowest
  VecRow<kNum> shifted, high, low;
  x.each([](Vec one, int) { return max(splat(kLowest), one); });
  shifted.each([&](Vec, int i) { return x.at[i] + kRound; });
  x.each([&](Vec one, int i) { return one - (shifted.at[i] - kRound); });
  high.each([&](Vec, int i) { return x.at[i] * 1.3264714507386088e-3f + 9.671513922512531e-3f; });
  low.each([&](Vec, int i) { return x.at[i] * 5.550733953714371e-2f + 0.24022242426872253f; });
  high.each([&](Vec p, int i) { return p * (x.at[i] * x.at[i]) + low.at[i]; });
  low.each([&](Vec, int i) { return x.at[i] * 0.6931470036506653f + 1.0f; });
  high.each([&](Vec p, int i) { return p * (x.at[i] * x.at[i]) + low.at[i]; });
  x.each([&](Vec, int i) { return high.at[i] * bit_cast<Vec>(bit_cast<WordVec>(shifted.at[i]) << 23); });
}

// Turns logits into shares, which are whole numbers after conversion. factor: by which logits become logarithms of
// weights, to the base of 2.
template <int kNum>
inline void to_shares(VecRow<kNum>& logits, Vec top, float factor) {
  logits.each([&](Vec one, int) { return (one - top) * factor; });
  raise_2_to<kShareBits>(logits);
}

inline IntVec whole(Vec number) { return __builtin_convertvector(number, IntVec); }

// Weights in two parts, so that 32 bits hold the sums of many: coarse * 2**kFineBits + fine.
struct WeightVec {
  IntVec coarse, fine;
};

// scaled: weights * 2**kFineBits.
inline WeightVec split_weight(Vec scaled) {
  constexpr float kFine = 1 << kFineBits;
  const IntVec coarse = whole(scaled);
  return {coarse, whole((scaled - __builtin_convertvector(coarse, Vec)) * kFine)};
}

// The sum of all lanes, whose fp32 sum would round.
inline int64_t sum_words(WordVec a) {
  typedef uint64_t LongVec __attribute__((vector_size(4 * KVPAGE_LANES)));
  const auto pairs = bit_cast<LongVec>(a);
  const LongVec sums = (pairs & 0xffffffffu) + (pairs >> 32);
  uint64_t total = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) total += sums[lane];
  return static_cast<int64_t>(total);
}

inline int64_t sum_of(const WeightVec& sums) {
  return (sum_words(bit_cast<WordVec>(sums.coarse)) << kFineBits) + sum_words(bit_cast<WordVec>(sums.fine));
}

}  // namespace
}  // namespace kvpage
