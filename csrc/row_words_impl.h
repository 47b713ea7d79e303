// RowCodec for rows of 16 bits, a register of 16-bit words at a time: by the tables of code_table.h, and int8 of bf16.
// Twice as many numbers at once as row_codec_impl.h, which it follows, and the same bits.
#include <limits>

#include "code_table.h"

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

// --- 8-bit floats by tables --------------------------------------------------------------------------------------------

#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
#define KVPAGE_HAS_TABLES 1

// What to add to magnitudes between the table's least and most, to have codes `shift` bits further up.
class CellOffsets {
 public:
  explicit CellOffsets(const EncodeTable& table)
      : normal_(_mm512_load_si512(table.normal)),
        low_(_mm512_loadu_si512(table.subnormal)),
        high_(_mm512_loadu_si512(table.subnormal + kWords)) {}

  Words at(Words magnitude, Words split) const {
    const __m512i small = _mm512_permutex2var_epi16(low_, bit_cast<__m512i>(magnitude >> 4), high_);
    const __mmask32 is_normal = _mm512_cmpge_epi16_mask(bit_cast<__m512i>(magnitude), bit_cast<__m512i>(split));
    return bit_cast<Words>(
        _mm512_mask_permutexvar_epi16(small, is_normal, bit_cast<__m512i>(magnitude >> 3), normal_));
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

// 16 bytes for each half of a register: what VPSHUFB looks up in.
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

// Of 16 codes, the numbers' low bytes in one half of a register and their high bytes in the other.
class CodeNumbers {
 public:
  explicit CodeNumbers(const DecodeTable& table) {
    for (int i = 0; i < 8; ++i) eighths_[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.halves[i]));
  }

  Words at(WordBytes codes) const {
    const __m256i index = _mm256_and_si256(_mm256_broadcastsi128_si256(bit_cast<__m128i>(codes)), _mm256_set1_epi8(0x7f));
    const auto pair = [&](int i, __m256i odd) {
      return _mm256_blendv_epi8(_mm256_shuffle_epi8(eighths_[i], index), _mm256_shuffle_epi8(eighths_[i + 1], index), odd);
    };
    // Bits 4, 5 and 6 of a code choose; a blend looks at bit 7.
    const __m256i odd = _mm256_slli_epi16(index, 3), second = _mm256_slli_epi16(index, 2);
    const __m256i low = _mm256_blendv_epi8(pair(0, odd), pair(2, odd), second);
    const __m256i high = _mm256_blendv_epi8(pair(4, odd), pair(6, odd), second);
    const __m256i found = _mm256_blendv_epi8(low, high, _mm256_slli_epi16(index, 1));
    const __m256i pairs = _mm256_permute4x64_epi64(found, 0xd8);
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const Words numbers = bit_cast<Words>(_mm256_shuffle_epi8(pairs, order));
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

// --- int8 of bf16 ------------------------------------------------------------------------------------------------------

// The even and the odd words of a register as fp32, and the other way round from words in the low bits of each.
inline Vec even_floats(Words words) { return bit_cast<Vec>(bit_cast<WordVec>(words) << 16); }
inline Vec odd_floats(Words words) { return bit_cast<Vec>(bit_cast<WordVec>(words) & 0xffff0000u); }
inline Words interleave(WordVec even, WordVec odd) { return bit_cast<Words>((even & 0xffffu) | (odd << 16)); }

inline uint16_t largest_word(Words words) {
#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
  const __m512i all = bit_cast<__m512i>(words);
  const __m256i half = _mm256_max_epu16(_mm512_maskz_extracti64x4_epi64(0xff, all, 0), _mm512_maskz_extracti64x4_epi64(0xff, all, 1));
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

// What numbers are multiplied with to become integers as those are that dividing by `scale`, rounded, makes of them.
//
// A product is off by a few 2**-24 of itself. With significands of 8 bits, a quotient's distance from halfway between two
// integers is more than 2**-16 of it, or none: |127 x / largest - (k + 1/2)| has 254 times x's significand below the
// line. None is for all of them if the scale is a power of two: then products are exact. Else it is for half of the
// largest alone, 127 being prime: a step of 2**-20 takes that to the side where the division puts it.
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

// At most kLanes rows: all their magnitudes first, since a row by itself is mostly waiting for its scale.
void encode_int8_few(const RowBatch& batch, float* scales) {
  uint32_t bits[kLanes] = {};
  for (int64_t i = 0; i < batch.num_rows; ++i)
    bits[i] = static_cast<uint32_t>(largest_bf16(batch.row(i), batch.size)) << 16;
  const Vec largest = bit_cast<Vec>(bits), scale = largest / 127.0f, inverse = int8_inverses(largest, scale);
  for (int64_t i = 0; i < batch.num_rows; ++i) {
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

void decode_int8_bf16(const std::byte* codes, int64_t size, float scale, std::byte* row, bool streaming) {
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

// --- by type -----------------------------------------------------------------------------------------------------------

template <typename T>
float encode_typed(Codec codec, const T* row, int64_t size, float scale, std::byte* codes) {
  if (codec == Codec::kInt8) return encode_int8_row(row, size, codes);
  if (codec == Codec::kE4m3) encode_fp8_row<E4m3>(row, size, scale, codes);
  if (codec == Codec::kE5m2) encode_fp8_row<E5m2>(row, size, scale, codes);
  return scale;
}

template <typename T>
void decode_typed(Codec codec, const std::byte* codes, int64_t size, float scale, T* row, bool streaming) {
  if (codec == Codec::kE4m3) return decode_fp8_row<E4m3>(codes, size, scale, row, streaming);
  if (codec == Codec::kE5m2) return decode_fp8_row<E5m2>(codes, size, scale, row, streaming);
  const Vec factor = splat(scale);
  decode_row(codes, size, row, streaming, [&](const std::byte* at) { return decode_int8(at) * factor; });
}

float encode(Codec codec, RowType type, const std::byte* row, int64_t size, float scale, std::byte* codes,
             bool streaming) {
  if (codec == Codec::kInt8 && type == RowType::kBfloat16) {
    encode_int8_bf16({row, 0, codes, 0, 1, size}, &scale);
    return scale;
  }
  switch (type) {
    case RowType::kBfloat16: return encode_typed(codec, reinterpret_cast<const Bf16*>(row), size, scale, codes);
    case RowType::kFloat16: return encode_typed(codec, reinterpret_cast<const Fp16*>(row), size, scale, codes);
    default: return encode_typed(codec, reinterpret_cast<const float*>(row), size, scale, codes);
  }
}

void decode(Codec codec, RowType type, const std::byte* codes, int64_t size, float scale, std::byte* row,
            bool streaming) {
  if (codec == Codec::kInt8 && type == RowType::kBfloat16 && scale <= std::numeric_limits<float>::max())
    return decode_int8_bf16(codes, size, scale, row, streaming);
  switch (type) {
    case RowType::kBfloat16: return decode_typed(codec, codes, size, scale, reinterpret_cast<Bf16*>(row), streaming);
    case RowType::kFloat16: return decode_typed(codec, codes, size, scale, reinterpret_cast<Fp16*>(row), streaming);
    default: return decode_typed(codec, codes, size, scale, reinterpret_cast<float*>(row), streaming);
  }
}

}  // namespace
}  // namespace kvpage
