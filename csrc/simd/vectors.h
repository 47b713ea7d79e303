// Vectors of KVPAGE_LANES floats in the compiler's vector extension, and the arithmetic of attention on them. For files
// that are compiled once per instruction set: everything here has internal linkage.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

// Floats in a register.
#define KVPAGE_LANES (KVPAGE_REGISTER_BYTES / 4)

// SHUFFLE(a, b, i...): lanes of a (from 0) and b (from KVPAGE_LANES).
#if defined(__clang__) || __GNUC__ >= 12
#define KVPAGE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVPAGE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

namespace kvpage {
namespace {

constexpr int kLanes = KVPAGE_LANES;

typedef float Vec __attribute__((vector_size(4 * KVPAGE_LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * KVPAGE_LANES)));
typedef uint32_t WordVec __attribute__((vector_size(4 * KVPAGE_LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * KVPAGE_LANES)));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* from) {
  Vec to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

inline Vec load(const Bf16* from) {
  HalfVec bits;
  std::memcpy(&bits, from, sizeof(bits));
  // One instruction, which GCC 12 does not find.
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  return bit_cast<Vec>(bit_cast<WordVec>(_mm512_maskz_cvtepu16_epi32(0xffff, bit_cast<__m256i>(bits))) << 16);
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  return bit_cast<Vec>(bit_cast<WordVec>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(bits))) << 16);
#else
  return bit_cast<Vec>(__builtin_convertvector(bits, WordVec) << 16);
#endif
}

inline Vec load(const Fp16* from) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  // With a mask of all lanes, the same instruction: GCC warns of an uninitialized operand in its own unmasked form.
  return bit_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif KVPAGE_LANES == 8 && defined(__F16C__)
  return bit_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  // The exponent is moved to its place and its bias mended by a product, which is exact and also makes subnormals
  // right; infinities and NaNs get their exponent by hand.
  HalfVec bits;
  std::memcpy(&bits, from, sizeof(bits));
  const WordVec wide = __builtin_convertvector(bits, WordVec);
  const WordVec magnitude = (wide & 0x7fff) << 13;
  const WordVec special = reinterpret_cast<WordVec>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  const Vec scaled = bit_cast<Vec>(magnitude) * 0x1p112f;
  return bit_cast<Vec>(bit_cast<WordVec>(scaled) | special | ((wide & 0x8000) << 16));
#endif
}

// Returns the first `count` elements and zeros after them; nothing past them is read.
template <typename T>
inline Vec load_partial(const T* from, int64_t count) {
  T elements[kLanes] = {};
  std::memcpy(elements, from, static_cast<size_t>(count) * sizeof(T));
  return load(elements);
}

inline void store(float* to, Vec from) { std::memcpy(to, &from, sizeof(from)); }

// a > b ? a : b, lane by lane: one instruction, which GCC does not find.
inline Vec max(Vec a, Vec b) {
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_maskz_max_ps(0xffff, bit_cast<__m512>(a), bit_cast<__m512>(b)));
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
  return bit_cast<Vec>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
#elif KVPAGE_LANES == 4 && defined(__SSE2__)
  return bit_cast<Vec>(_mm_max_ps(bit_cast<__m128>(a), bit_cast<__m128>(b)));
#else
  return a > b ? a : b;
#endif
}

// The four sums of all lanes of four vectors, in the lowest lanes.
inline Vec sum_lanes(Vec a, Vec b, Vec c, Vec d) {
#if KVPAGE_LANES == 4
  const Vec ab = KVPAGE_SHUFFLE(a, b, 0, 4, 1, 5) + KVPAGE_SHUFFLE(a, b, 2, 6, 3, 7);
  const Vec cd = KVPAGE_SHUFFLE(c, d, 0, 4, 1, 5) + KVPAGE_SHUFFLE(c, d, 2, 6, 3, 7);
  return KVPAGE_SHUFFLE(ab, cd, 0, 1, 4, 5) + KVPAGE_SHUFFLE(ab, cd, 2, 3, 6, 7);
#elif KVPAGE_LANES == 8
  const Vec ab = KVPAGE_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + KVPAGE_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const Vec cd = KVPAGE_SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + KVPAGE_SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  const Vec all = KVPAGE_SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + KVPAGE_SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  return all + KVPAGE_SHUFFLE(all, all, 4, 5, 6, 7, 0, 1, 2, 3);
#else
  // In each quarter of the vectors: two steps of pairwise sums leave (a, b, c, d) there; then the quarters are added.
  const Vec ab = KVPAGE_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 KVPAGE_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const Vec cd = KVPAGE_SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 KVPAGE_SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const Vec all = KVPAGE_SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  KVPAGE_SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  const Vec half = all + KVPAGE_SHUFFLE(all, all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  return half + KVPAGE_SHUFFLE(half, half, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#endif
}

inline float sum_lanes(Vec a) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += a[lane];
  return total;
}

inline float max_lanes(Vec a) {
  float top = a[0];
  for (int lane = 1; lane < kLanes; ++lane) top = a[lane] > top ? a[lane] : top;
  return top;
}

// e**x for x <= 0, within 2 units in the last place; 0 where that is below the smallest normal number. NaN stays.
// e**x = 2**n * e**r with n = round(x / ln 2); ln 2 is taken off in two parts; the polynomial is Cephes' expf.
inline Vec exp_negative(Vec x) {
  constexpr float kLowest = -87.33654f,
                  kRound = 12582912.0f;  // 1.5 * 2**23: adding it leaves the integer in the low bits
  const Vec clamped = x < kLowest ? splat(kLowest) : x;
  const Vec shifted = clamped * 1.44269504f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const WordVec exponent = (bit_cast<WordVec>(shifted) + 127u) << 23;
  return x < kLowest ? Vec{} : p * bit_cast<Vec>(exponent);
}

// 2**x for x <= 0, within 2 units in the last place; 0 where that is below the smallest normal number. NaN stays.
// 2**x = 2**n * 2**r with n = round(x); the polynomial is Cephes' exp2f.
inline Vec exp2_negative(Vec x) {
  constexpr float kLowest = -126.0f,
                  kRound = 12582912.0f + 127.0f;  // adding it leaves the exponent's bits lowest
  const Vec shifted = max(splat(kLowest), x) + kRound;
  const Vec r = max(splat(kLowest), x) - (shifted - kRound);
  Vec p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  const Vec power = p * bit_cast<Vec>(bit_cast<WordVec>(shifted) << 23);
  return bit_cast<Vec>(bit_cast<WordVec>(power) & ~reinterpret_cast<WordVec>(x < kLowest));
}

// Cephes' tanhf: a polynomial where 1 - e**-2|x| would cancel.
inline Vec tanh(Vec x) {
  const WordVec sign = bit_cast<WordVec>(x) & 0x80000000u;
  const Vec magnitude = bit_cast<Vec>(bit_cast<WordVec>(x) ^ sign);
  const Vec square = x * x;
  Vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec near = x + x * square * p;
  const Vec power = exp_negative(magnitude * -2.0f);
  const Vec far = bit_cast<Vec>(bit_cast<WordVec>((1.0f - power) / (1.0f + power)) | sign);
  return magnitude < 0.625f ? near : far;
}

// --- stores past the processor's cache, after which the thread has to fence ----------------------------------------

template <typename T>
inline void store_whole(std::byte* to, const T& from) {
  std::memcpy(to, &from, sizeof(from));
}

// Returns whether `bytes` from `to` on are worth streaming in vectors of this size: whole cache lines, since a part of
// one is written to memory by itself.
template <typename T>
inline bool can_stream(const std::byte* to, int64_t bytes) {
#if defined(__SSE2__)
  return sizeof(T) >= 16 && reinterpret_cast<uintptr_t>(to) % 64 == 0 && bytes % 64 == 0;
#else
  static_cast<void>(to), static_cast<void>(bytes);
  return false;
#endif
}

// `to` is a multiple of the vector's size.
template <typename T>
inline void stream(std::byte* to, const T& from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bit_cast<__m512i>(from));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bit_cast<__m256i>(from));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(T) == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bit_cast<__m128i>(from));
#endif
  store_whole(to, from);
}

// --- one element, rounded to the nearest, ties to even -------------------------------------------------------------

inline void store_element(float* to, float x) { *to = x; }

inline void store_element(Bf16* to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}

inline void store_element(Fp16* to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude >= 0x47800000) {  // 2**16 and more, infinity, NaN
    half = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 rounds at the right bit
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
}

}  // namespace
}  // namespace kvpage
