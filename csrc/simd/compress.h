// The lanes that pass a comparison, packed to the front of a register. For files that are compiled once per
// instruction set.
//
//   lanes   [ a b c d ]   bits 0b1010   ─► packed [ b d . . ]
#pragma once

#include "simd/vectors.h"

namespace kvpage {
namespace {

// One bit a lane, the lowest for the first.
inline uint32_t less_bits(IntVec a, IntVec b) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  return _mm512_cmplt_epi32_mask(bit_cast<__m512i>(a), bit_cast<__m512i>(b));
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(a < b)));
#elif KVPAGE_LANES == 4 && defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(bit_cast<__m128>(a < b)));
#else
  const IntVec found = a < b;
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(found[lane] & 1) << lane;
  return bits;
#endif
}

inline uint32_t at_least_bits(Vec a, Vec b) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  return _mm512_cmp_ps_mask(bit_cast<__m512>(a), bit_cast<__m512>(b), _CMP_GE_OQ);
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(a >= b)));
#elif KVPAGE_LANES == 4 && defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(bit_cast<__m128>(a >= b)));
#else
  const IntVec found = a >= b;
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(found[lane] & 1) << lane;
  return bits;
#endif
}

inline int num_bits(uint32_t bits) { return __builtin_popcount(bits); }

#if KVPAGE_LANES == 8 && defined(__AVX2__)
// For each set of lanes: their numbers, a byte each, in order.
struct LaneOrders {
  uint64_t of[256] = {};
  constexpr LaneOrders() {
    for (int bits = 0; bits < 256; ++bits)
      for (int lane = 0, place = 0; lane < 8; ++lane)
        if (bits >> lane & 1) of[bits] |= static_cast<uint64_t>(lane) << (8 * place++);
  }
};
constexpr LaneOrders kLaneOrders;
#endif

// Writes the lanes of `bits`, in order, to `to`. The rest of a register's length after them is overwritten.
template <typename T, typename Lanes>
inline void store_packed(T* to, Lanes from, uint32_t bits) {
  static_assert(sizeof(T) == 4 && sizeof(Lanes) == 4 * kLanes);
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  const __m512i packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), bit_cast<__m512i>(from));
  std::memcpy(to, &packed, sizeof(packed));
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kLaneOrders.of[bits])));
  const __m256i packed = _mm256_permutevar8x32_epi32(bit_cast<__m256i>(from), order);
  std::memcpy(to, &packed, sizeof(packed));
#else
  T lanes[kLanes];
  std::memcpy(lanes, &from, sizeof(lanes));
  for (int lane = 0, place = 0; lane < kLanes; place += bits >> lane & 1, ++lane) to[place] = lanes[lane];
#endif
}

}  // namespace
}  // namespace kvpage
