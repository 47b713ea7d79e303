// Products of a tile: scores of query rows with its keys, and sums of its values by their weights. For the body of
// AttentionKernel, compiled once for each instruction set.
//
// Both are products of matrices, and made alike: a few rows by a few vectors of columns stay in registers, each element
// of a row is multiplied by the vectors. The keys are turned for that, so that neighbours of a vector are keys:
//
//   turned   panel 0: element 0: keys 0..p-1, element 1: keys 0..p-1 ...     panel 1: element 0: keys p..2p-1 ...
//   packed   panel 0: key 0: elements 0..p-1, key 1: elements 0..p-1 ...     panel 1: key 0: elements p..2p-1 ...
//
// A panel is small enough for the first cache, and is used by all rows before the next.
//
// A word of a row is multiplied by words of columns. A word is a number of fp32; or two of bf16, in a processor that
// multiplies pairs: two neighbouring elements of queries and keys, and the weights and values of keys 2 i and 2 i + 1.
#pragma once

#include <type_traits>

#include "attention/attention_kernel.h"
#include "simd/pairs.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

#if KVPAGE_REGISTER_BYTES == 64 || defined(__aarch64__)
constexpr int kSumRegisters = 24;  // of 32; the rest hold columns and an element
#else
constexpr int kSumRegisters = 12;  // of 16
#endif
constexpr int kPanelVectors = kSumRegisters == 24 && kLanes == 4 ? 4 : 2;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kMostRows = kSumRegisters / kPanelVectors;
static_assert(kTileKeys % kPanel == 0 && kRowPadding % kLanes == 0);

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t padded(int64_t size) { return (size + kRowPadding - 1) / kRowPadding * kRowPadding; }

using Pair = uint32_t;  // two numbers of bf16, the first one in the lower half

template <typename Word>
using Words = std::conditional_t<std::is_same_v<Word, Pair>, WordVec, Vec>;
template <typename Word>
constexpr int64_t kNumbers = std::is_same_v<Word, Pair> ? 2 : 1;  // of a word

inline Vec multiply_add(Vec sum, float x, Vec y) { return sum + x * y; }
inline Vec multiply_add(Vec sum, Pair x, WordVec y) { return dot_pairs(sum, x - WordVec{}, y); }

// Rows of words in scratch.
struct Rows {
  float* data;
  int64_t stride;  // words

  float* operator[](int64_t row) const { return data + row * stride; }
  template <typename Word>
  Word word(int64_t row, int64_t i) const {
    Word word;
    std::memcpy(&word, (*this)[row] + i, sizeof(word));
    return word;
  }
  Rows from(int64_t row) const { return {data + row * stride, stride}; }
  Rows column(int64_t d) const { return {data + d, stride}; }
};

// The vectors of columns that so many rows leave registers for: a power of two.
constexpr int num_columns(int num_rows) {
  int columns = 8;
  while (columns * num_rows > kSumRegisters) columns /= 2;
  return columns;
}

// call(the number of rows, as a constant), for a number from 1 to kMostRows.
template <int kRows = kMostRows, typename Call>
inline void with_rows(int64_t num_rows, const Call& call) {
  if constexpr (kRows > 1)
    if (num_rows < kRows) return with_rows<kRows - 1>(num_rows, call);
  call(std::integral_constant<int, kRows>{});
}

// call(first row, number of rows) for parts of at most kMostRows, nearly equal.
template <typename Call>
inline void for_row_blocks(int64_t num_rows, const Call& call) {
  const int64_t blocks = (num_rows + kMostRows - 1) / kMostRows;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = num_rows * block / blocks;
    call(row, num_rows * (block + 1) / blocks - row);
  }
}

// Rows of a tile that are read soon. A few lines of them are asked for between two products: all at once would wait in
// line, for a processor has about 20 requests under way.
class Prefetch {
 public:
  Prefetch() = default;  // of nothing

  // `rows` are kTileKeys, of `size` elements each, or null. All are asked for after `num_steps` steps.
  template <typename T>
  Prefetch(const T* const* rows, int64_t size, int64_t num_steps)
      : rows_(reinterpret_cast<const std::byte* const*>(rows)), row_bytes_(size * static_cast<int64_t>(sizeof(T))) {
    const int64_t num_lines = kTileKeys * ((row_bytes_ + kLineBytes - 1) / kLineBytes);
    lines_a_step_ = (num_lines + num_steps - 1) / num_steps;
    num_rows_ = rows ? kTileKeys : 0;
  }

  void step() {
    for (int64_t line = 0; line < lines_a_step_ && row_ < num_rows_; ++line) {
      __builtin_prefetch(rows_[row_] + at_, 0, 2);
      at_ += kLineBytes;
      if (at_ >= row_bytes_) at_ = 0, ++row_;
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;

  const std::byte* const* rows_ = nullptr;
  int64_t row_bytes_ = 0, lines_a_step_ = 0, num_rows_ = 0;
  int64_t row_ = 0, at_ = 0;  // the next line
};

// --- keys turned ---------------------------------------------------------------------------------------------------

#if KVPAGE_LANES == 4
inline Vec low_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 4, 1, 5); }
inline Vec high_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 6, 3, 7); }
inline Vec low_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 1, 4, 5); }
inline Vec high_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 3, 6, 7); }
#elif KVPAGE_LANES == 8
inline Vec low_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
inline Vec high_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
inline Vec low_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13); }
inline Vec high_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
#else
inline Vec low_words(Vec a, Vec b) {
  return KVPAGE_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
inline Vec high_words(Vec a, Vec b) {
  return KVPAGE_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline Vec low_pairs(Vec a, Vec b) {
  return KVPAGE_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
inline Vec high_pairs(Vec a, Vec b) {
  return KVPAGE_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
#endif

// Pieces of 16 bytes of the rows 0, 4, ..., beside each other.
inline Vec load_pieces(const std::byte* const* rows, int64_t at) {
#if KVPAGE_LANES >= 8 && defined(__AVX__)
  const auto piece = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[4 * i] + at)); };
  const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(piece(0)), piece(1), 1);
#endif
#if KVPAGE_LANES == 16 && defined(__AVX512F__)
  const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(piece(2)), piece(3), 1);
  return bit_cast<Vec>(_mm512_maskz_insertf32x8(0xffff, _mm512_castps256_ps512(low), high, 1));
#elif KVPAGE_LANES == 8 && defined(__AVX__)
  return bit_cast<Vec>(low);
#else
  Vec pieces;
  for (int i = 0; i < kLanes / 4; ++i)
    std::memcpy(reinterpret_cast<std::byte*>(&pieces) + 16 * i, rows[4 * i] + at, 16);
  return pieces;
#endif
}

// A square of words from kLanes rows, its columns as vectors. A piece of 16 bytes is four words of a row; pieces of the
// rows i, i + 4, ... are beside each other in a register, so that four rows by four words are turned in all at once:
//
//   rows      a0 a1 a2 a3 | e0 e1 e2 e3          columns     a0 b0 c0 d0 | e0 f0 g0 h0
//             b0 b1 b2 b3 | f0 f1 f2 f3                      a1 b1 c1 d1 | e1 f1 g1 h1
inline void load_turned(const std::byte* const* rows, int64_t at, Vec (&columns)[kLanes]) {
  for (int c = 0; c < kLanes; c += 4) {
    Vec pieces[4];
    for (int i = 0; i < 4; ++i) pieces[i] = load_pieces(rows + i, at + c * 4);
    const Vec a = low_words(pieces[0], pieces[1]), b = high_words(pieces[0], pieces[1]);
    const Vec e = low_words(pieces[2], pieces[3]), f = high_words(pieces[2], pieces[3]);
    columns[c] = low_pairs(a, e), columns[c + 1] = high_pairs(a, e);
    columns[c + 2] = low_pairs(b, f), columns[c + 3] = high_pairs(b, f);
  }
}

// Elements of a row that become columns at once. Words are fp32, or pairs of bf16.
template <typename T>
constexpr int64_t kSquareElements = sizeof(T) == 2 ? 2 * kLanes : kLanes;

inline void turn_square(const std::byte* const* rows, int64_t at, const float*, float, int64_t count, float* to) {
  Vec columns[kLanes];
  load_turned(rows, at, columns);
  for (int64_t d = 0; d < count; ++d) store(to + d * kPanel, columns[d]);
}

inline void turn_square(const std::byte* const* rows, int64_t at, const Bf16*, Pair, int64_t count, float* to) {
  Vec columns[kLanes];
  load_turned(rows, at, columns);
  for (int64_t i = 0; i < count / 2; ++i) store(to + i * kPanel, columns[i]);
}

inline void turn_square(const std::byte* const* rows, int64_t at, const Bf16*, float, int64_t count, float* to) {
  Vec columns[kLanes];
  load_turned(rows, at, columns);
  for (int64_t d = 0; d < count; ++d) {
    const WordVec pairs = bit_cast<WordVec>(columns[d / 2]);
    store(to + d * kPanel, bit_cast<Vec>(d % 2 ? pairs & 0xffff0000u : pairs << 16));
  }
}

inline void turn_square(const std::byte* const* rows, int64_t at, const Fp16*, float, int64_t count, float* to) {
  float wide[kLanes][2 * kLanes];
  const std::byte* wide_rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const Fp16* from = reinterpret_cast<const Fp16*>(rows[i] + at);
    store(wide[i], load(from)), store(wide[i] + kLanes, load(from + kLanes));
    wide_rows[i] = reinterpret_cast<const std::byte*>(wide[i]);
  }
  for (int64_t d = 0; d < count; d += kLanes)
    turn_square(wide_rows, d * 4, static_cast<const float*>(nullptr), 0.0f, least(kLanes, count - d), to + d * kPanel);
}

// Writes one vector of keys of a panel. While a row is read, `next` of it is fetched: blocks are anywhere in memory, so
// the hardware cannot foresee them.
template <typename Word, typename T>
inline void turn_vector(const std::byte* const* rows, const T* const* next, int64_t size, float* to) {
  constexpr int64_t kStep = kSquareElements<T>;
  const T* const type = nullptr;
  int64_t d = 0;
  for (; d + kStep <= size; d += kStep) {
    if (next)
      for (int i = 0; i < kLanes; ++i) __builtin_prefetch(next[i] + d, 0, 2);
    turn_square(rows, d * sizeof(T), type, Word{}, kStep, to + d / kNumbers<Word> * kPanel);
  }
  if (d == size) return;
  T rest[kLanes][kStep] = {};  // nothing past the end of a row is read
  const std::byte* rest_rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    std::memcpy(rest[i], rows[i] + d * sizeof(T), static_cast<size_t>(size - d) * sizeof(T));
    rest_rows[i] = reinterpret_cast<const std::byte*>(rest[i]);
  }
  turn_square(rest_rows, 0, type, Word{}, size - d, to + d / kNumbers<Word> * kPanel);
}

// Writes the panels of keys [begin, end) of a tile, whole vectors of them.
template <typename Word, typename T>
void turn_keys(const T* const* keys, const T* const* next, int64_t begin, int64_t end, int64_t size, float* turned) {
  for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
    const std::byte* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = reinterpret_cast<const std::byte*>(keys[j + i]);
    turn_vector<Word>(rows, next ? next + j : nullptr, size,
                      turned + j / kPanel * kPanel * (size / kNumbers<Word>)+j % kPanel);
  }
}

// --- scores ----------------------------------------------------------------------------------------------------------

template <typename Word, int kRows, int kPanels>
inline void score_block(Rows queries, const float* turned, int64_t num_words, Rows scores) {
  Vec sums[kRows][kPanels * kPanelVectors] = {};
  for (int64_t i = 0; i < num_words; ++i) {
    Words<Word> keys[kPanels * kPanelVectors];
    for (int p = 0; p < kPanels; ++p)
      for (int c = 0; c < kPanelVectors; ++c)
        keys[p * kPanelVectors + c] =
            bit_cast<Words<Word>>(load(turned + p * kPanel * num_words + i * kPanel + c * kLanes));
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kPanels * kPanelVectors; ++c)
        sums[r][c] = multiply_add(sums[r][c], queries.word<Word>(r, i), keys[c]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kPanels * kPanelVectors; ++c) store(scores[r] + c * kLanes, sums[r][c]);
}

// The scores of rows with the panels [first, last). A key has `num_words` words.
template <typename Word, int kRows>
inline void score_panels(Rows queries, const float* turned, int64_t num_words, int64_t first, int64_t last, Rows scores,
                         Prefetch& soon) {
  constexpr int kPanels = most(num_columns(kRows) / kPanelVectors, 1);
  const auto panel = [&](int64_t i) { return turned + i * kPanel * num_words; };
  for (; first + kPanels <= last; first += kPanels, soon.step())
    score_block<Word, kRows, kPanels>(queries, panel(first), num_words, scores.column(first * kPanel));
  for (; first < last; ++first, soon.step())
    score_block<Word, kRows, 1>(queries, panel(first), num_words, scores.column(first * kPanel));
}

// --- sums of values --------------------------------------------------------------------------------------------------

// The words of vector c of elements, of the keys that word i has. Those outside [begin, end) are zeros, whatever they
// were.
template <typename Load>
inline Vec value_words(float, int64_t i, int64_t, int64_t, const Load& load_value) {
  return load_value(i);
}

template <typename Load>
inline WordVec value_words(Pair, int64_t i, int64_t begin, int64_t end, const Load& load_value) {
  const uint32_t low = 2 * i >= begin ? 0xffffu : 0u, high = 2 * i + 1 < end ? 0xffff0000u : 0u;
  return load_value(i) & (low | high);
}

// Adds the values of keys [begin, end) by their weights; load_value(i, c): word i of each lane of vector c.
template <typename Word, int kRows, int kColumns, typename LoadValue>
inline void sum_block(Rows weights, int64_t begin, int64_t end, Rows sums, const LoadValue& load_value) {
  Vec total[kRows][kColumns];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) total[r][c] = load(sums[r] + c * kLanes);
  for (int64_t i = begin / kNumbers<Word>; i * kNumbers<Word> < end; ++i) {
    Words<Word> value[kColumns];
    for (int c = 0; c < kColumns; ++c)
      value[c] = value_words(Word{}, i, begin, end, [&](int64_t word) { return load_value(word, c); });
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) total[r][c] = multiply_add(total[r][c], weights.word<Word>(r, i), value[c]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) store(sums[r] + c * kLanes, total[r][c]);
}

// Word i of the elements from d on, `count` of them, at most kLanes.
template <typename T>
inline Vec read_values(float, const T* const* values, int64_t i, int64_t d, int64_t count) {
  return count >= kLanes ? load(values[i] + d) : load_partial(values[i] + d, count);
}

template <typename T>
inline WordVec read_values(Pair, const T* const* values, int64_t i, int64_t d, int64_t count) {
  const Vec low = read_values(float{}, values, 2 * i, d, count),
            high = read_values(float{}, values, 2 * i + 1, d, count);
  return bit_cast<WordVec>(low) >> 16 | bit_cast<WordVec>(high);
}

// Values in place, from element d on; `next` as for turn_keys.
template <typename Word, int kRows, int kColumns, typename T>
inline void sum_columns(Rows weights, const T* const* values, const T* const* next, int64_t begin, int64_t end,
                        int64_t d, int64_t size, Rows sums) {
  for (; d + kColumns * kLanes <= size; d += kColumns * kLanes)
    sum_block<Word, kRows, kColumns>(weights, begin, end, sums.column(d), [&](int64_t i, int c) {
      if (next)
        for (int64_t j = i * kNumbers<Word>; j < (i + 1) * kNumbers<Word>; ++j)
          __builtin_prefetch(next[j] + d + c * kLanes, 0, 2);
      return read_values(Word{}, values, i, d + c * kLanes, kLanes);
    });
  if constexpr (kColumns > 1)
    return sum_columns<Word, kRows, kColumns / 2>(weights, values, next, begin, end, d, size, sums);
  if (d < size)
    sum_block<Word, kRows, 1>(weights, begin, end, sums.column(d),
                              [&](int64_t i, int) { return read_values(Word{}, values, i, d, size - d); });
}

// Copies the words of the values of keys [begin, end) into panels, the last vector filled up with zeros.
template <typename Word, typename T>
void pack_values(const T* const* values, int64_t begin, int64_t end, int64_t size, float* packed) {
  for (int64_t i = begin / kNumbers<Word>; i * kNumbers<Word> < end; ++i)
    for (int64_t d = 0; d < padded(size); d += kLanes) {
      float* const to = packed + (d / kPanel * kTileKeys + i) * kPanel + d % kPanel;
      store(to, d < size ? bit_cast<Vec>(read_values(Word{}, values, i, d, size - d)) : Vec{});
    }
}

template <typename Word, int kRows>
inline void sum_packed(Rows weights, const float* packed, int64_t begin, int64_t end, int64_t size, Rows sums,
                       Prefetch& soon) {
  for (int64_t d = 0; d < size; d += kPanel, soon.step()) {
    const float* panel = packed + d * kTileKeys;
    const auto words = [&](int64_t i, int64_t c) { return bit_cast<Words<Word>>(load(panel + i * kPanel + c)); };
    if (d + kPanel <= padded(size))
      sum_block<Word, kRows, kPanelVectors>(weights, begin, end, sums.column(d),
                                            [&](int64_t i, int c) { return words(i, c * kLanes); });
    else
      for (int64_t c = 0; d + c < padded(size); c += kLanes)
        sum_block<Word, kRows, 1>(weights, begin, end, sums.column(d + c), [&](int64_t i, int) { return words(i, c); });
  }
}

}  // namespace
}  // namespace kvpage
