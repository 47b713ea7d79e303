// Products of pairs of bf16: an instruction of some processors, or a model of it in plain C++. For files that are
// compiled once per instruction set: everything here has internal linkage.
#pragma once

#include "simd/vectors.h"

namespace kvpage {
namespace {

// Whether products of bf16 are made of pairs: elsewhere the model is slower than to widen the numbers.
#if (KVPAGE_LANES == 16 && defined(__AVX512BF16__)) || defined(KVPAGE_MODELS_PAIRS)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

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

// Returns the nearest numbers of bf16, ties to even. None may be subnormal.
inline HalfVec round_to_bf16(Vec x) {
#if KVPAGE_LANES == 16 && defined(__AVX512BF16__)
  return bit_cast<HalfVec>(_mm512_maskz_cvtneps_pbh(0xffff, bit_cast<__m512>(x)));
#else
  Bf16 elements[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) store_element(elements + lane, x[lane]);
  return bit_cast<HalfVec>(elements);
#endif
}

}  // namespace
}  // namespace kvpage
