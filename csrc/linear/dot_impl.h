// One step of a dot product: a vector of x times a vector of w, added to a vector of sums.
//
//   WidenedDot<T>   both as fp32, kLanes elements a step: one fused multiply-add
//   PairDot         both as bf16, twice as many: vdpbf16ps, or a model of it
//
// A Dot has: Staged, the type of x in scratch; Weight, the type of w in memory; Factor, a vector of either, of kWidth
// elements.
#pragma once

#include "quantize/rows_impl.h"
#include "simd/pairs.h"

namespace kvpage {
namespace {

template <typename T>
struct WidenedDot {
  using Staged = float;
  using Weight = T;
  using Factor = Vec;
  static constexpr int64_t kWidth = kLanes;

  static Factor load_x(const float* from) { return load(from); }
  static Factor load_w(const T* from) { return load(from); }
  static Vec multiply_add(Vec total, Factor x, Factor w) { return total + x * w; }
};

struct PairDot {
  using Staged = Bf16;
  using Weight = Bf16;
  using Factor = WordVec;
  static constexpr int64_t kWidth = 2 * kLanes;

  static Factor load_x(const Bf16* from) {
    Factor pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    return pairs;
  }
  static Factor load_w(const Bf16* from) { return load_x(from); }
  static Vec multiply_add(Vec total, Factor x, Factor w) { return dot_pairs(total, x, w); }
};

using Bf16Dot = std::conditional_t<kHasPairs, PairDot, WidenedDot<Bf16>>;

}  // namespace
}  // namespace kvpage
