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
#pragma once

#include <type_traits>

#include "attention/attention_kernel.h"
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

// Rows of fp32 in scratch.
struct Rows {
  float* data;
  int64_t stride;  // elements

  float* operator[](int64_t row) const { return data + row * stride; }
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

// --- keys turned ---------------------------------------------------------------------------------------------------

#if KVPAGE_LANES == 4
inline Vec low_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 4, 1, 5); }
inline Vec high_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 6, 3, 7); }
inline Vec low_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 1, 4, 5); }
inline Vec high_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 3, 6, 7); }
inline Vec load_pieces(const std::byte* const* rows, int64_t at) {
  return load(reinterpret_cast<const float*>(rows[0] + at));
}
#elif KVPAGE_LANES == 8
inline Vec low_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
inline Vec high_words(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
inline Vec low_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13); }
inline Vec high_pairs(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
inline Vec load_pieces(const std::byte* const* rows, int64_t at) {
  const auto piece = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[4 * i] + at)); };
  return bit_cast<Vec>(_mm256_insertf128_ps(_mm256_castps128_ps256(piece(0)), piece(1), 1));
}
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
inline Vec load_pieces(const std::byte* const* rows, int64_t at) {
  const auto piece = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[4 * i] + at)); };
  const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(piece(0)), piece(1), 1);
  const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(piece(2)), piece(3), 1);
  return bit_cast<Vec>(_mm512_maskz_insertf32x8(0xffff, _mm512_castps256_ps512(low), high, 1));
}
#endif

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

inline void turn_square(const std::byte* const* rows, int64_t at, const float*, int64_t count, float* to) {
  Vec columns[kLanes];
  load_turned(rows, at, columns);
  for (int64_t d = 0; d < count; ++d) store(to + d * kPanel, columns[d]);
}

inline void turn_square(const std::byte* const* rows, int64_t at, const Bf16*, int64_t count, float* to) {
  Vec columns[kLanes];
  load_turned(rows, at, columns);
  for (int64_t d = 0; d < count; ++d) {
    const WordVec pairs = bit_cast<WordVec>(columns[d / 2]);
    store(to + d * kPanel, bit_cast<Vec>(d % 2 ? pairs & 0xffff0000u : pairs << 16));
  }
}

inline void turn_square(const std::byte* const* rows, int64_t at, const Fp16*, int64_t count, float* to) {
  float wide[kLanes][2 * kLanes];
  const std::byte* wide_rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const Fp16* from = reinterpret_cast<const Fp16*>(rows[i] + at);
    store(wide[i], load(from)), store(wide[i] + kLanes, load(from + kLanes));
    wide_rows[i] = reinterpret_cast<const std::byte*>(wide[i]);
  }
  for (int64_t d = 0; d < count; d += kLanes)
    turn_square(wide_rows, d * 4, static_cast<const float*>(nullptr), least(kLanes, count - d), to + d * kPanel);
}

// Writes one vector of keys of a panel. While a row is read, `next` of it is fetched: blocks are anywhere in memory, so
// the hardware cannot foresee them.
template <typename T>
inline void turn_vector(const std::byte* const* rows, const T* const* next, int64_t size, float* to) {
  constexpr int64_t kStep = kSquareElements<T>;
  const T* const type = nullptr;
  int64_t d = 0;
  for (; d + kStep <= size; d += kStep) {
    if (next)
      for (int i = 0; i < kLanes; ++i) __builtin_prefetch(next[i] + d, 0, 2);
    turn_square(rows, d * sizeof(T), type, kStep, to + d * kPanel);
  }
  if (d == size) return;
  T rest[kLanes][kStep] = {};  // nothing past the end of a row is read
  const std::byte* rest_rows[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    std::memcpy(rest[i], rows[i] + d * sizeof(T), static_cast<size_t>(size - d) * sizeof(T));
    rest_rows[i] = reinterpret_cast<const std::byte*>(rest[i]);
  }
  turn_square(rest_rows, 0, type, size - d, to + d * kPanel);
}

// Writes the panels of keys [begin, end) of a tile, whole vectors of them.
template <typename T>
void turn_keys(const T* const* keys, const T* const* next, int64_t begin, int64_t end, int64_t size, float* turned) {
  for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
    const std::byte* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = reinterpret_cast<const std::byte*>(keys[j + i]);
    turn_vector(rows, next ? next + j : nullptr, size, turned + j / kPanel * kPanel * size + j % kPanel);
  }
}

// --- scores ----------------------------------------------------------------------------------------------------------

template <int kRows, int kPanels>
inline void score_block(Rows queries, const float* turned, int64_t size, Rows scores) {
  Vec sums[kRows][kPanels * kPanelVectors] = {};
  for (int64_t d = 0; d < size; ++d) {
    Vec keys[kPanels * kPanelVectors];
    for (int p = 0; p < kPanels; ++p)
      for (int c = 0; c < kPanelVectors; ++c)
        keys[p * kPanelVectors + c] = load(turned + p * kPanel * size + d * kPanel + c * kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kPanels * kPanelVectors; ++c) sums[r][c] += queries[r][d] * keys[c];
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kPanels * kPanelVectors; ++c) store(scores[r] + c * kLanes, sums[r][c]);
}

// The scores of rows with the panels [first, last).
template <int kRows>
inline void score_panels(Rows queries, const float* turned, int64_t size, int64_t first, int64_t last, Rows scores) {
  constexpr int kPanels = most(num_columns(kRows) / kPanelVectors, 1);
  for (; first + kPanels <= last; first += kPanels)
    score_block<kRows, kPanels>(queries, turned + first * kPanel * size, size, scores.column(first * kPanel));
  for (; first < last; ++first)
    score_block<kRows, 1>(queries, turned + first * kPanel * size, size, scores.column(first * kPanel));
}

// --- sums of values --------------------------------------------------------------------------------------------------

template <int kRows, int kColumns, typename LoadValue>
inline void sum_block(Rows weights, int64_t begin, int64_t end, Rows sums, const LoadValue& load_value) {
  Vec total[kRows][kColumns];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) total[r][c] = load(sums[r] + c * kLanes);
  for (int64_t j = begin; j < end; ++j) {
    Vec value[kColumns];
    for (int c = 0; c < kColumns; ++c) value[c] = load_value(j, c);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) total[r][c] += weights[r][j] * value[c];
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) store(sums[r] + c * kLanes, total[r][c]);
}

// Values in place, from element d on; `next` as for turn_keys.
template <int kRows, int kColumns, typename T>
inline void sum_columns(Rows weights, const T* const* values, const T* const* next, int64_t begin, int64_t end,
                        int64_t d, int64_t size, Rows sums) {
  for (; d + kColumns * kLanes <= size; d += kColumns * kLanes)
    sum_block<kRows, kColumns>(weights, begin, end, sums.column(d), [&](int64_t j, int c) {
      if (next) __builtin_prefetch(next[j] + d + c * kLanes, 0, 2);
      return load(values[j] + d + c * kLanes);
    });
  if constexpr (kColumns > 1) return sum_columns<kRows, kColumns / 2>(weights, values, next, begin, end, d, size, sums);
  if (d < size)
    sum_block<kRows, 1>(weights, begin, end, sums.column(d),
                        [&](int64_t j, int) { return load_partial(values[j] + d, size - d); });
}

// Copies values [begin, end) into panels, the last vector filled up with zeros.
template <typename T>
void pack_values(const T* const* values, const T* const* next, int64_t begin, int64_t end, int64_t size,
                 float* packed) {
  const auto place = [&](int64_t j, int64_t d) { return packed + (d / kPanel * kTileKeys + j) * kPanel + d % kPanel; };
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t d = 0; d < whole; d += kLanes) {
      if (next) __builtin_prefetch(next[j] + d, 0, 2);
      store(place(j, d), load(values[j] + d));
    }
    for (int64_t d = whole; d < padded(size); d += kLanes)
      store(place(j, d), d < size ? load_partial(values[j] + d, size - d) : Vec{});
  }
}

template <int kRows>
inline void sum_packed(Rows weights, const float* packed, int64_t begin, int64_t end, int64_t size, Rows sums) {
  for (int64_t d = 0; d < size; d += kPanel) {
    const float* panel = packed + d * kTileKeys;
    if (d + kPanel <= padded(size))
      sum_block<kRows, kPanelVectors>(weights, begin, end, sums.column(d),
                                      [&](int64_t j, int c) { return load(panel + j * kPanel + c * kLanes); });
    else
      for (int64_t c = 0; d + c < padded(size); c += kLanes)
        sum_block<kRows, 1>(weights, begin, end, sums.column(d + c),
                            [&](int64_t j, int) { return load(panel + j * kPanel + c); });
  }
}

}  // namespace
}  // namespace kvpage
