// int8 of bf16, a register of 16-bit words at a time; other rows, and those with no ordinary scale: rows_impl.h.
#pragma once

#include "base/prefetch.h"
#include "quantize/quantize_kernel.h"
#include "quantize/rows_impl.h"
#include "simd/words.h"

namespace kvpage {
namespace {

// The even and the odd words of a register as fp32, and the other way round from words in the low bits of each.
inline Vec even_floats(Words words) { return bit_cast<Vec>(bit_cast<WordVec>(words) << 16); }
inline Vec odd_floats(Words words) { return bit_cast<Vec>(bit_cast<WordVec>(words) & 0xffff0000u); }
inline Words interleave(WordVec even, WordVec odd) { return bit_cast<Words>((even & 0xffffu) | (odd << 16)); }

inline uint16_t largest_word(Words words) {
#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
  const __m512i all = bit_cast<__m512i>(words);
  const __m256i half =
      _mm256_max_epu16(_mm512_maskz_extracti64x4_epi64(0xff, all, 0), _mm512_maskz_extracti64x4_epi64(0xff, all, 1));
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  const __m256i half = bit_cast<__m256i>(words);
#endif
#if KVPAGE_LANES >= 8 && defined(__AVX2__)
  const __m128i eight = _mm_max_epu16(_mm256_extracti128_si256(half, 0), _mm256_extracti128_si256(half, 1));
  // There is an instruction for the least of eight.
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)))));
#else
  uint16_t largest = 0;
  for (int64_t lane = 0; lane < kWords; ++lane) largest = std::max(largest, static_cast<uint16_t>(words[lane]));
  return largest;
#endif
}

// Bits of the largest magnitude: as integers they have the same order, and a NaN is above them all.
inline uint16_t largest_bf16(const std::byte* row, int64_t size) {
  Words most = {};
  int64_t d = 0;
  const auto take = [&](const std::byte* from, int64_t count) {
    Words numbers = {};
    std::memcpy(&numbers, from, static_cast<size_t>(2 * count));
    const Words magnitude = numbers & 0x7fff;
    most = magnitude > most ? magnitude : most;
  };
  for (; d + kWords <= size; d += kWords) take(row + 2 * d, kWords);
  if (d < size) take(row + 2 * d, size - d);
  return largest_word(most);
}

// Returns the factors whose rounded products equal the rounded quotients by `scale`.
//
// A product is off by a few 2**-24 of itself. With significands of 8 bits, 127 x / largest is never nearer to halfway
// between two integers than 1 / (254 * 255) of itself, unless it is halfway. If the scale is a power of two, products
// are exact. Else half of the largest alone is halfway, 127 being prime, and where the division rounds that to depends
// on the scale's own rounding: a step of 2**-20, which is too short for all others, takes it to the same side.
inline Vec int8_inverses(Vec largest, Vec scale) {
  const Vec inverse = 1.0f / scale;
  const Vec stepped = inverse * (largest * 0.5f / scale < 63.5f ? splat(1.0f - 0x1p-20f) : splat(1.0f + 0x1p-20f));
  return (bit_cast<WordVec>(scale) & 0x7fffffu) == 0 ? inverse : stepped;
}

// A row whose scale is an ordinary number.
inline void encode_int8_by(float inverse, const std::byte* row, int64_t size, std::byte* codes) {
  const Vec factor = splat(inverse);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: the sum's low bits are the integer, ties to even
  convert_row<WordBytes, Words>(row, size, codes, false, [&](Words numbers) {
    const Vec even = even_floats(numbers) * factor + kRound, odd = odd_floats(numbers) * factor + kRound;
    return narrow(interleave(bit_cast<WordVec>(even), bit_cast<WordVec>(odd)));
  });
}

// Encodes at most kLanes rows: all their magnitudes first, since a single row mostly waits for its scale. Memory ahead
// is fetched a row at a time: many lines at once have to wait.
void encode_int8_few(const RowBatch& batch, float* scales) {
  uint32_t bits[kLanes] = {};
  for (int64_t i = 0; i < batch.num_rows; ++i)
    bits[i] = static_cast<uint32_t>(largest_bf16(batch.row(i), batch.size)) << 16;
  const Vec largest = bit_cast<Vec>(bits), scale = largest / 127.0f, inverse = int8_inverses(largest, scale);
  for (int64_t i = 0; i < batch.num_rows; ++i) {
    if (batch.ahead != 0) prefetch(batch.row(i) + batch.ahead, 2 * batch.size);
    scales[i] = scale[i];
    if (scales[i] >= 0x1p-100f && scales[i] <= 0x1p100f) {
      encode_int8_by(inverse[i], batch.row(i), batch.size, batch.codes_of(i));
    } else {
      encode_int8_row(reinterpret_cast<const Bf16*>(batch.row(i)), batch.size, batch.codes_of(i));
    }
  }
}

void encode_int8_bf16(const RowBatch& batch, float* scales) {
  for (int64_t i = 0; i < batch.num_rows; i += kLanes)
    encode_int8_few(batch.part(i, std::min<int64_t>(kLanes, batch.num_rows - i)), scales + i);
}

#ifdef __AVX512BF16__
// One instruction rounds all products of a register, and takes those below fp32's normal numbers for zero.
constexpr float kLeastRounded = 0x1p-100f;

inline void decode_int8_normal(const std::byte* codes, int64_t size, float scale, std::byte* row, bool streaming) {
  const Vec factor = splat(scale);
  const auto products = [&](__m128i bytes) {
    const IntVec integers = bit_cast<IntVec>(_mm512_maskz_cvtepi8_epi32(0xffff, bytes));
    return bit_cast<__m512>(__builtin_convertvector(integers, Vec) * factor);
  };
  convert_row<Words, SignedWordBytes>(codes, size, row, streaming, [&](SignedWordBytes bytes) {
    const __m256i all = bit_cast<__m256i>(bytes);
    const __m512 low = products(_mm256_castsi256_si128(all)), high = products(_mm256_extracti128_si256(all, 1));
    return bit_cast<Words>(_mm512_maskz_cvtne2ps_pbh(0xffffffff, high, low));
  });
}
#endif

void decode_int8_bf16(const std::byte* codes, int64_t size, float scale, std::byte* row, bool streaming) {
#ifdef __AVX512BF16__
  if (scale >= kLeastRounded) return decode_int8_normal(codes, size, scale, row, streaming);
#endif
  const Vec factor = splat(scale);
  const auto rounded = [&](IntVec integers) {
    const WordVec bits = bit_cast<WordVec>(__builtin_convertvector(integers, Vec) * factor);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  };
  convert_row<Words, SignedWordBytes>(codes, size, row, streaming, [&](SignedWordBytes bytes) {
    const IntVec pairs = bit_cast<IntVec>(widen(bytes));
    const WordVec even = rounded((pairs << 16) >> 16), odd = rounded(pairs >> 16);
    return bit_cast<Words>((even >> 16) | (odd & 0xffff0000u));
  });
}

}  // namespace
}  // namespace kvpage
