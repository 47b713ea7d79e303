// RowCodec's functions by tables (code_table.h), for the instruction sets that look numbers up in registers. Follows
// row_codec_impl.h.
#include "code_table.h"

namespace kvpage {
namespace {

#if KVPAGE_LANES == 16 && defined(__AVX512BW__)
constexpr int64_t kWords = 32;
typedef uint16_t Words __attribute__((vector_size(2 * kWords)));
typedef uint8_t WordBytes __attribute__((vector_size(kWords)));

inline Words load_words(const void* from) {
  Words to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

inline Words load_bytes(const std::byte* from) {
  return bit_cast<Words>(
      _mm512_maskz_cvtepu8_epi16(0xffffffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

inline void store_bytes(std::byte* to, Words words) {
  const __m256i bytes = _mm512_maskz_cvtepi16_epi8(0xffffffff, bit_cast<__m512i>(words));
  std::memcpy(to, &bytes, sizeof(bytes));
}

// EncodeTable in registers.
class WordEncoder {
 public:
  explicit WordEncoder(const EncodeTable& table)
      : normal_(_mm512_load_si512(table.normal)),
        low_(_mm512_loadu_si512(table.subnormal)),
        high_(_mm512_loadu_si512(table.subnormal + kWords)),
        least_(_mm512_set1_epi16(static_cast<int16_t>(table.least))),
        split_(_mm512_set1_epi16(static_cast<int16_t>(table.split))),
        most_(_mm512_set1_epi16(static_cast<int16_t>(table.most))) {}

  template <int kShift>
  Words encode(Words numbers) const {
    const __m512i magnitude = bit_cast<__m512i>(numbers & 0x7fff);
    const __m512i within = _mm512_min_epu16(_mm512_max_epu16(magnitude, least_), most_);
    const __m512i small = _mm512_permutex2var_epi16(low_, _mm512_srli_epi16(within, 4), high_);
    const __m512i offset = _mm512_mask_permutexvar_epi16(small, _mm512_cmpge_epi16_mask(within, split_),
                                                         _mm512_srli_epi16(within, 3), normal_);
    const __m512i code = _mm512_srli_epi16(_mm512_add_epi16(within, offset), kShift);
    const __mmask32 is_nan = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    const Words codes = bit_cast<Words>(_mm512_mask_mov_epi16(code, is_nan, _mm512_set1_epi16(0x7f)));
    return codes | ((numbers >> 8) & 0x80);
  }

 private:
  __m512i normal_, low_, high_, least_, split_, most_;
};

class WordDecoder {
 public:
  explicit WordDecoder(const DecodeTable& table) {
    for (int i = 0; i < 4; ++i) quarters_[i] = _mm512_load_si512(table.numbers + i * kWords);
  }

  Words decode(Words codes) const {
    const __m512i index = bit_cast<__m512i>(codes);
    const __m512i low = _mm512_permutex2var_epi16(quarters_[0], index, quarters_[1]);
    const __m512i high = _mm512_permutex2var_epi16(quarters_[2], index, quarters_[3]);
    const __mmask32 is_high = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40));
    return bit_cast<Words>(_mm512_mask_mov_epi16(low, is_high, high)) | ((codes << 8) & 0x8000);
  }

 private:
  __m512i quarters_[4];
};

template <int kShift>
void encode_words(const EncodeTable& table, const std::byte* row, int64_t size, std::byte* codes) {
  const WordEncoder encoder(table);
  int64_t d = 0;
  for (; d + kWords <= size; d += kWords) store_bytes(codes + d, encoder.encode<kShift>(load_words(row + 2 * d)));
  if (d == size) return;
  uint16_t last[kWords] = {};
  std::memcpy(last, row + 2 * d, static_cast<size_t>(2 * (size - d)));
  std::byte last_codes[kWords];
  store_bytes(last_codes, encoder.encode<kShift>(load_words(last)));
  std::memcpy(codes + d, last_codes, static_cast<size_t>(size - d));
}

void encode_by_table(const EncodeTable& table, const std::byte* row, int64_t size, std::byte* codes) {
  table.shift == 4 ? encode_words<4>(table, row, size, codes) : encode_words<5>(table, row, size, codes);
}

void decode_by_table(const DecodeTable& table, const std::byte* codes, int64_t size, std::byte* row) {
  const WordDecoder decoder(table);
  int64_t d = 0;
  for (; d + kWords <= size; d += kWords) {
    const Words numbers = decoder.decode(load_bytes(codes + d));
    std::memcpy(row + 2 * d, &numbers, sizeof(numbers));
  }
  if (d == size) return;
  std::byte last[kWords] = {};
  std::memcpy(last, codes + d, static_cast<size_t>(size - d));
  const Words numbers = decoder.decode(load_bytes(last));
  std::memcpy(row + 2 * d, &numbers, static_cast<size_t>(2 * (size - d)));
}
#else
constexpr auto encode_by_table = nullptr, decode_by_table = nullptr;
#endif

}  // namespace
}  // namespace kvpage
