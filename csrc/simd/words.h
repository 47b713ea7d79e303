// Registers of 16-bit words, twice as many numbers at once as simd.h's vectors, and rows converted with them.
#pragma once

#include <cstring>

#include "simd/vectors.h"

namespace kvpage {
namespace {

constexpr int64_t kWords = 2 * kLanes;

typedef uint16_t Words __attribute__((vector_size(2 * kWords)));
typedef int16_t SignedWords __attribute__((vector_size(2 * kWords)));
typedef uint8_t WordBytes __attribute__((vector_size(kWords)));
typedef int8_t SignedWordBytes __attribute__((vector_size(kWords)));

inline WordBytes narrow(Words words) {
#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
  return bit_cast<WordBytes>(_mm512_maskz_cvtepi16_epi8(0xffffffff, bit_cast<__m512i>(words)));
#else
  return __builtin_convertvector(words, WordBytes);
#endif
}

inline Words widen(WordBytes bytes) {
#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
  return bit_cast<Words>(_mm512_maskz_cvtepu8_epi16(0xffffffff, bit_cast<__m256i>(bytes)));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}

inline SignedWords widen(SignedWordBytes bytes) {
#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
  return bit_cast<SignedWords>(_mm512_maskz_cvtepi8_epi16(0xffffffff, bit_cast<__m256i>(bytes)));
#else
  return __builtin_convertvector(bytes, SignedWords);
#endif
}

// to[d] = convert(from[d]) for a row of `size` numbers: a register at a time, the rest by way of a copy.
template <typename To, typename From, typename Convert>
inline void convert_row(const std::byte* from, int64_t size, std::byte* to, bool streaming, const Convert& convert) {
  constexpr int64_t kFrom = sizeof(From) / kWords, kTo = sizeof(To) / kWords;
  const auto load_from = [&](int64_t d) {
    From numbers;
    std::memcpy(&numbers, from + d * kFrom, sizeof(numbers));
    return numbers;
  };
  int64_t d = 0;
  if (streaming && can_stream<To>(to, size * kTo)) {
    for (; d + kWords <= size; d += kWords) stream(to + d * kTo, convert(load_from(d)));
  } else {
    for (; d + kWords <= size; d += kWords) store_whole(to + d * kTo, convert(load_from(d)));
  }
  if (d == size) return;
  From numbers = {};
  std::memcpy(&numbers, from + d * kFrom, static_cast<size_t>((size - d) * kFrom));
  const To last = convert(numbers);
  std::memcpy(to + d * kTo, &last, static_cast<size_t>((size - d) * kTo));
}

}  // namespace
}  // namespace kvpage
