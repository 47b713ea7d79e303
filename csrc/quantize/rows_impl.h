// Rows to codes and back in fp32, a vector at a time, for any type. Every faster way must equal it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "quantize/quantize_kernel.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

typedef uint8_t ByteVec __attribute__((vector_size(KVPAGE_LANES)));

constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kNan = 0x7fc00000u;

// Lane by lane. As the compiler's own conditional it becomes one blend.
inline WordVec choose(IntVec condition, WordVec yes, WordVec no) { return condition ? yes : no; }

inline void store_codes(std::byte* to, WordVec codes) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)  // one instruction, which compilers do not find
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, bit_cast<__m512i>(codes));
#else
  const ByteVec bytes = __builtin_convertvector(codes, ByteVec);
#endif
  std::memcpy(to, &bytes, sizeof(bytes));
}

inline WordVec load_codes(const std::byte* from) {
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, WordVec);
}

// --- 8-bit floats --------------------------------------------------------------------------------------------------

// Magnitudes as bits of fp32, at most `Format`'s largest or a NaN, to codes without sign. Normal numbers: the exponent
// is moved and the bits after the mantissa are rounded off, ties to even. Subnormal ones: adding a number whose last
// bit is the smallest code's rounds there.
struct E4m3 {
  static constexpr float kMost = 448.0f;
  static WordVec encode(WordVec magnitude) {
    const WordVec normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    const WordVec subnormal = bit_cast<WordVec>(bit_cast<Vec>(magnitude) + 16384.0f) - 0x46800000u;
    return choose(bit_cast<IntVec>(magnitude) < (121 << 23), subnormal, normal);
  }
  static WordVec decode(WordVec code) {
    const WordVec normal = (code << 20) + (120u << 23);
    const WordVec subnormal = bit_cast<WordVec>(__builtin_convertvector(code & 7u, Vec) * 0x1p-9f);
    const WordVec finite = choose(bit_cast<IntVec>(code) < 8, subnormal, normal);
    return choose(bit_cast<IntVec>(code) == 0x7f, WordVec{} + kNan, finite);
  }
};

struct E5m2 {
  static constexpr float kMost = 57344.0f;
  static WordVec encode(WordVec magnitude) {
    const WordVec normal = (magnitude - (112u << 23) + 0xfffffu + ((magnitude >> 21) & 1u)) >> 21;
    const WordVec subnormal = bit_cast<WordVec>(bit_cast<Vec>(magnitude) + 128.0f) - 0x43000000u;
    return choose(bit_cast<IntVec>(magnitude) < (113 << 23), subnormal, normal);
  }
  static WordVec decode(WordVec code) {
    const WordVec normal = (code << 21) + (112u << 23);
    const WordVec subnormal = bit_cast<WordVec>(__builtin_convertvector(code & 3u, Vec) * 0x1p-16f);
    const WordVec finite = choose(bit_cast<IntVec>(code) < 4, subnormal, normal);
    return choose(bit_cast<IntVec>(code) >= 0x7c, (code << 21) | kInfinity, finite);
  }
};

template <typename Format>
inline WordVec encode_fp8(Vec x) {
  const WordVec bits = bit_cast<WordVec>(x), magnitude = bits & ~kSign;
  const uint32_t most = bit_cast<uint32_t>(Format::kMost);
  const IntVec is_nan = bit_cast<IntVec>(magnitude) > static_cast<int32_t>(kInfinity);
  const IntVec least = IntVec{} + static_cast<int32_t>(most), given = bit_cast<IntVec>(magnitude);
  const WordVec code = Format::encode(bit_cast<WordVec>(given < least ? given : least));
  return choose(is_nan, WordVec{} + 0x7fu, code) | ((bits & kSign) >> 24);
}

// Codes as numbers that are `kUnit` times too small. Half precision holds them all, and where the processor converts
// it, moving the bits there is all that is left to do, subnormal numbers included.
#if (KVPAGE_LANES == 16 && defined(__AVX512F__)) || (KVPAGE_LANES == 8 && defined(__F16C__))
inline HalfVec to_half(E4m3, HalfVec code) {
  const HalfVec magnitude = code & 0x7f;
  const HalfVec is_nan = reinterpret_cast<HalfVec>(magnitude == 0x7f);
  return (magnitude << 7) | (is_nan & 0x7e00) | ((code & 0x80) << 8);
}
inline HalfVec to_half(E5m2, HalfVec code) { return code << 8; }
template <typename Format>
constexpr float kUnit = std::is_same_v<Format, E4m3> ? 256.0f : 1.0f;

template <typename Format>
inline Vec decode_fp8(const std::byte* codes) {
  ByteVec bytes;
  std::memcpy(&bytes, codes, sizeof(bytes));
  const HalfVec half = to_half(Format{}, __builtin_convertvector(bytes, HalfVec));
  return load(reinterpret_cast<const Fp16*>(&half));
}
#else
template <typename Format>
constexpr float kUnit = 1.0f;

template <typename Format>
inline Vec decode_fp8(const std::byte* codes) {
  const WordVec code = load_codes(codes);
  return bit_cast<Vec>(Format::decode(code & 0x7fu) | ((code & 0x80u) << 24));
}
#endif

// --- rows, a vector at a time --------------------------------------------------------------------------------------

inline Vec packed(Vec from, const float*) { return from; }

inline HalfVec packed(Vec from, const Bf16*) {
  const WordVec bits = bit_cast<WordVec>(from), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const IntVec is_nan = bit_cast<IntVec>(bits & ~kSign) > static_cast<int32_t>(kInfinity);
  const WordVec wide = choose(is_nan, WordVec{} + 0x7fc0u, rounded);
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  return bit_cast<HalfVec>(_mm512_maskz_cvtepi32_epi16(0xffff, bit_cast<__m512i>(wide)));
#else
  return __builtin_convertvector(wide, HalfVec);
#endif
}

inline HalfVec packed(Vec from, const Fp16*) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  return bit_cast<HalfVec>(_mm512_maskz_cvtps_ph(0xffff, bit_cast<__m512>(from), _MM_FROUND_TO_NEAREST_INT));
#elif KVPAGE_LANES == 8 && defined(__F16C__)
  return bit_cast<HalfVec>(_mm256_cvtps_ph(bit_cast<__m256>(from), _MM_FROUND_TO_NEAREST_INT));
#else
  Fp16 elements[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) store_element(elements + lane, from[lane]);
  return bit_cast<HalfVec>(elements);
#endif
}

// Calls whole(d) for each vector of a row, and end(d, count) for what is left.
template <typename Whole, typename End>
inline void for_each_vector(int64_t size, const Whole& whole, const End& end) {
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) whole(d);
  if (d < size) end(d, size - d);
}

template <typename T, typename Encode>
inline void encode_row(const T* row, int64_t size, std::byte* codes, const Encode& encode) {
  for_each_vector(
      size, [&](int64_t d) { store_codes(codes + d, encode(load(row + d))); },
      [&](int64_t d, int64_t count) {
        std::byte last[kLanes];
        store_codes(last, encode(load_partial(row + d, count)));
        std::memcpy(codes + d, last, static_cast<size_t>(count));
      });
}

template <typename T, typename Decode>
inline void decode_row(const std::byte* codes, int64_t size, T* row, bool streaming, const Decode& decode) {
  using Packed = decltype(packed(Vec{}, row));
  std::byte* const to = reinterpret_cast<std::byte*>(row);
  const bool streams = streaming && can_stream<Packed>(to, size * static_cast<int64_t>(sizeof(T)));
  for_each_vector(
      size,
      [&](int64_t d) {
        const Packed elements = packed(decode(codes + d), row);
        std::byte* const place = to + d * static_cast<int64_t>(sizeof(T));
        streams ? stream(place, elements) : store_whole(place, elements);
      },
      [&](int64_t d, int64_t count) {
        std::byte last[kLanes] = {};
        std::memcpy(last, codes + d, static_cast<size_t>(count));
        const Packed elements = packed(decode(last), row);
        std::memcpy(row + d, &elements, static_cast<size_t>(count) * sizeof(T));
      });
}

// Dividing by a power of two is multiplying by another one, as long as both are normal.
inline bool has_exact_inverse(float scale) {
  const uint32_t bits = bit_cast<uint32_t>(scale);
  return (bits & 0x7fffffu) == 0 && bits >= (2u << 23) && bits <= (252u << 23);
}

template <typename Format, typename T>
inline void encode_fp8_row(const T* row, int64_t size, float scale, std::byte* codes) {
  if (has_exact_inverse(scale)) {
    const Vec inverse = splat(1.0f / scale);
    return encode_row(row, size, codes, [&](Vec x) { return encode_fp8<Format>(x * inverse); });
  }
  const Vec divisor = splat(scale);
  encode_row(row, size, codes, [&](Vec x) { return encode_fp8<Format>(x / divisor); });
}

// NaN if one is among the elements.
template <typename T>
inline float largest_magnitude(const T* row, int64_t size) {
  IntVec most = {};  // bits of positive numbers: as integers they have the same order, and a NaN is above them all
  auto take = [&](Vec x) {
    const IntVec magnitude = bit_cast<IntVec>(bit_cast<WordVec>(x) & ~kSign);
    most = magnitude > most ? magnitude : most;
  };
  for_each_vector(
      size, [&](int64_t d) { take(load(row + d)); },
      [&](int64_t d, int64_t count) { take(load_partial(row + d, count)); });
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  // GCC warns of an uninitialized operand in its own reduction.
  const __m512i all = bit_cast<__m512i>(most);
  const __m256i eight =
      _mm256_max_epi32(_mm512_maskz_extracti64x4_epi64(0xff, all, 0), _mm512_maskz_extracti64x4_epi64(0xff, all, 1));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
  const __m128i one = _mm_max_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));
  return bit_cast<float>(_mm_cvtsi128_si32(one));
#else
  int32_t lanes[kLanes];
  std::memcpy(lanes, &most, sizeof(most));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = std::max(lanes[lane], lanes[lane + half]);
  return bit_cast<float>(lanes[0]);
#endif
}

// Rounds to the nearest integer, ties to even, for magnitudes up to 2**22.
inline Vec round_even(Vec x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2**23
  return (x + kRound) - kRound;
}

template <typename T>
inline float encode_int8_row(const T* row, int64_t size, std::byte* codes) {
  const float scale = largest_magnitude(row, size) / 127.0f;
  const Vec step = splat(scale > 0 ? scale : 1.0f), most = splat(127.0f);
  encode_row(row, size, codes, [&](Vec x) {
    const Vec ratio = x / step;
    const Vec bounded = ratio > most ? most : ratio < -most ? -most : ratio;
    const Vec rounded = bounded == bounded ? round_even(bounded) : Vec{};
    return bit_cast<WordVec>(__builtin_convertvector(rounded, IntVec)) & 0xffu;
  });
  return scale;
}

inline Vec decode_int8(const std::byte* codes) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const IntVec values = bit_cast<IntVec>(_mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const IntVec values = bit_cast<IntVec>(_mm256_cvtepi8_epi32(bytes));
#else
  const IntVec values = bit_cast<IntVec>(load_codes(codes) << 24) >> 24;
#endif
  return __builtin_convertvector(values, Vec);
}

// The unit is part of the scale, where that is exact: one product, rounded once.
template <typename Format, typename T>
void decode_fp8_row(const std::byte* codes, int64_t size, float scale, T* row, bool streaming) {
  if (scale < 0x1p119f) {
    const Vec factor = splat(scale * kUnit<Format>);
    const auto scaled = [&](const std::byte* at) { return decode_fp8<Format>(at) * factor; };
    return decode_row(codes, size, row, streaming, scaled);
  }
  const Vec factor = splat(scale);
  const auto scaled = [&](const std::byte* at) { return decode_fp8<Format>(at) * kUnit<Format> * factor; };
  decode_row(codes, size, row, streaming, scaled);
}

}  // namespace
}  // namespace kvpage
