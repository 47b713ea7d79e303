// One step of a dot product: a vector of x times a vector of w, added to a vector of sums.
//
//   WidenedDot<T>   both as fp32, kLanes elements a step: one fused multiply-add
//   PairDot         both as bf16, twice as many: vdpbf16ps, or a model of it
//
// A Dot has: Staged, the type of x in scratch; Weight, the type of w in memory; Factor, a vector of either, of kWidth
// elements.
#pragma once

#include "quantize/rows_impl.h"

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

// --- pairs of bf16 -------------------------------------------------------------------------------------------------

// Numbers below the smallest normal one become zeros with their sign.
inline Vec flushed(Vec x) {
  const WordVec bits = bit_cast<WordVec>(x);
  const WordVec is_normal = reinterpret_cast<WordVec>((bits & 0x7f800000u) != 0);
  return bit_cast<Vec>(bits & (is_normal | 0x80000000u));
}

// Adds a.high * b.high to each sum, then a.low * b.low. Each word holds two numbers of bf16. Subnormal numbers count as
// zeros, given or computed. The model is the loop in Intel's manual; a product of two such numbers is exact in fp32.
inline Vec dot_pairs(Vec sum, WordVec a, WordVec b) {
#if KVPAGE_LANES == 16 && defined(__AVX512BF16__)
  return bit_cast<Vec>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
#else
  const auto high = [](WordVec pairs) { return flushed(bit_cast<Vec>(pairs & 0xffff0000u)); };
  const auto low = [](WordVec pairs) { return flushed(bit_cast<Vec>(pairs << 16)); };
  const Vec once = flushed(flushed(sum) + high(a) * high(b));
  return flushed(once + low(a) * low(b));
#endif
}

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

#if defined(__AVX512BF16__) || defined(KVPAGE_MODELS_PAIRS)
using Bf16Dot = PairDot;
#else
using Bf16Dot = WidenedDot<Bf16>;
#endif

}  // namespace
}  // namespace kvpage
