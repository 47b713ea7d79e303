// QuantizeKernel's functions by the tables of code_table.h, for the instruction sets that look numbers up in registers.
#pragma once

#include "quantize/code_table.h"
#include "simd/words.h"

namespace kvpage {
namespace {

#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
#define KVPAGE_HAS_TABLES 1

// The offsets that turn magnitudes between the table's least and most into codes, `shift` bits further up.
class CellOffsets {
 public:
  explicit CellOffsets(const EncodeTable& table)
      : normal_(_mm512_load_si512(table.normal)),
        low_(_mm512_loadu_si512(table.subnormal)),
        high_(_mm512_loadu_si512(table.subnormal + kWords)) {}

  Words at(Words magnitude, Words split) const {
    const __m512i small = _mm512_permutex2var_epi16(low_, bit_cast<__m512i>(magnitude >> 4), high_);
    const __mmask32 is_normal = _mm512_cmpge_epi16_mask(bit_cast<__m512i>(magnitude), bit_cast<__m512i>(split));
    return bit_cast<Words>(_mm512_mask_permutexvar_epi16(small, is_normal, bit_cast<__m512i>(magnitude >> 3), normal_));
  }

 private:
  __m512i normal_, low_, high_;
};

class CodeNumbers {
 public:
  explicit CodeNumbers(const DecodeTable& table)
      : first_(_mm512_load_si512(table.numbers)),
        second_(_mm512_load_si512(table.numbers + kWords)),
        third_(_mm512_load_si512(table.numbers + 2 * kWords)),
        fourth_(_mm512_load_si512(table.numbers + 3 * kWords)) {}

  Words at(WordBytes codes) const {
    const Words wide = widen(codes);
    const __m512i index = bit_cast<__m512i>(wide);
    const __m512i low = _mm512_permutex2var_epi16(first_, index, second_);
    const __m512i high = _mm512_permutex2var_epi16(third_, index, fourth_);
    const __mmask32 is_high = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40));
    return bit_cast<Words>(_mm512_mask_mov_epi16(low, is_high, high)) | ((wide << 8) & 0x8000);
  }

 private:
  __m512i first_, second_, third_, fourth_;
};
#elif KVPAGE_LANES == 8 && defined(__AVX2__)
#define KVPAGE_HAS_TABLES 1

// 16 bytes for each half of a register: the table of VPSHUFB.
inline __m256i load_lookup(const uint8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

inline Words look_up(__m256i bytes, Words index) {
  return bit_cast<Words>(_mm256_shuffle_epi8(bytes, bit_cast<__m256i>(index)));
}

class CellOffsets {
 public:
  explicit CellOffsets(const EncodeTable& table)
      : normal_(load_lookup(table.normal_bytes)),
        subnormal_{load_lookup(table.subnormal_bytes), load_lookup(table.subnormal_bytes + 16),
                   load_lookup(table.subnormal_bytes + 32)},
        normal_base_(Words{} + table.normal_base),
        first_cell_(Words{} + static_cast<uint16_t>(table.least >> 4)) {}

  Words at(Words magnitude, Words split) const {
    constexpr uint16_t kNoHighByte = 0x8000;
    const Words cell = (magnitude >> 4) - first_cell_, index = cell | kNoHighByte;
    const Words third = look_up(subnormal_[2], index), second = look_up(subnormal_[1], index);
    const SignedWords number = bit_cast<SignedWords>(cell);
    const Words from_second = number > 31 ? third : second;
    const Words small = (number > 15 ? from_second : look_up(subnormal_[0], index)) - (magnitude & 0xfff0);
    const Words large = look_up(normal_, ((magnitude >> 3) & 15) | kNoHighByte) + normal_base_;
    return bit_cast<SignedWords>(magnitude) < bit_cast<SignedWords>(split) ? small : large;
  }

 private:
  __m256i normal_, subnormal_[3];
  Words normal_base_, first_cell_;
};

// The numbers of 16 codes: low bytes in one half of a register, high bytes in the other.
class CodeNumbers {
 public:
  explicit CodeNumbers(const DecodeTable& table) {
    for (int i = 0; i < 8; ++i) eighths_[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.halves[i]));
  }

  Words at(WordBytes codes) const {
    const __m256i both = _mm256_broadcastsi128_si256(bit_cast<__m128i>(codes));
    const __m256i index = _mm256_and_si256(both, _mm256_set1_epi8(0x7f));
    const auto pair = [&](int i, __m256i odd) {
      const __m256i first = _mm256_shuffle_epi8(eighths_[i], index);
      return _mm256_blendv_epi8(first, _mm256_shuffle_epi8(eighths_[i + 1], index), odd);
    };
    // Bits 4, 5 and 6 of a code choose; a blend looks at bit 7.
    const __m256i odd = _mm256_slli_epi16(index, 3), second = _mm256_slli_epi16(index, 2);
    const __m256i low = _mm256_blendv_epi8(pair(0, odd), pair(2, odd), second);
    const __m256i high = _mm256_blendv_epi8(pair(4, odd), pair(6, odd), second);
    const __m256i found = _mm256_blendv_epi8(low, high, _mm256_slli_epi16(index, 1));
    const __m256i pairs = _mm256_permute4x64_epi64(found, 0xd8);
    const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const Words numbers = bit_cast<Words>(_mm256_shuffle_epi8(pairs, _mm256_broadcastsi128_si256(order)));
    return numbers | ((widen(codes) << 8) & 0x8000);
  }

 private:
  __m256i eighths_[8];
};
#endif

#ifdef KVPAGE_HAS_TABLES
template <int kShift>
void encode_shifted(const EncodeTable& table, const std::byte* row, int64_t size, std::byte* codes, bool streaming) {
  const CellOffsets offsets(table);
  const SignedWords least = SignedWords{} + static_cast<int16_t>(table.least);
  const SignedWords most = SignedWords{} + static_cast<int16_t>(table.most);
  const Words split = Words{} + table.split;
  convert_row<WordBytes, Words>(row, size, codes, streaming, [&](Words numbers) {
    const SignedWords given = bit_cast<SignedWords>(numbers & 0x7fff), raised = given > least ? given : least;
    const Words magnitude = bit_cast<Words>(raised < most ? raised : most);
    const Words code = (magnitude + offsets.at(magnitude, split)) >> kShift;
    return narrow((given > 0x7f80 ? Words{} + 0x7f : code) | ((numbers >> 8) & 0x80));
  });
}

void encode_by_table(const EncodeTable& table, const std::byte* row, int64_t size, std::byte* codes, bool streaming) {
  const auto encode = table.shift == 4 ? &encode_shifted<4> : &encode_shifted<5>;
  encode(table, row, size, codes, streaming);
}

void decode_by_table(const DecodeTable& table, const std::byte* codes, int64_t size, std::byte* row, bool streaming) {
  const CodeNumbers numbers(table);
  convert_row<Words, WordBytes>(codes, size, row, streaming, [&](WordBytes bytes) { return numbers.at(bytes); });
}
#else
constexpr auto encode_by_table = nullptr, decode_by_table = nullptr;
#endif

}  // namespace
}  // namespace kvpage
