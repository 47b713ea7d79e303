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
inline void turn_square(Vec (&rows)[4]) {
  const Vec a = KVPAGE_SHUFFLE(rows[0], rows[1], 0, 4, 1, 5), b = KVPAGE_SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
  const Vec c = KVPAGE_SHUFFLE(rows[2], rows[3], 0, 4, 1, 5), d = KVPAGE_SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
  rows[0] = KVPAGE_SHUFFLE(a, c, 0, 1, 4, 5), rows[1] = KVPAGE_SHUFFLE(a, c, 2, 3, 6, 7);
  rows[2] = KVPAGE_SHUFFLE(b, d, 0, 1, 4, 5), rows[3] = KVPAGE_SHUFFLE(b, d, 2, 3, 6, 7);
}
#elif KVPAGE_LANES == 8
inline void turn_square(Vec (&rows)[8]) {
  Vec quarters[8];  // each pair of lanes of 16 bytes is turned: 4 rows by 4 columns
  for (int i = 0; i < 8; i += 4) {
    const Vec a = KVPAGE_SHUFFLE(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec b = KVPAGE_SHUFFLE(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    const Vec c = KVPAGE_SHUFFLE(rows[i + 2], rows[i + 3], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec d = KVPAGE_SHUFFLE(rows[i + 2], rows[i + 3], 2, 10, 3, 11, 6, 14, 7, 15);
    quarters[i] = KVPAGE_SHUFFLE(a, c, 0, 1, 8, 9, 4, 5, 12, 13);
    quarters[i + 1] = KVPAGE_SHUFFLE(a, c, 2, 3, 10, 11, 6, 7, 14, 15);
    quarters[i + 2] = KVPAGE_SHUFFLE(b, d, 0, 1, 8, 9, 4, 5, 12, 13);
    quarters[i + 3] = KVPAGE_SHUFFLE(b, d, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = KVPAGE_SHUFFLE(quarters[i], quarters[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = KVPAGE_SHUFFLE(quarters[i], quarters[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#else
inline void turn_square(Vec (&rows)[16]) {
  Vec quarters[16];  // each four lanes of 16 bytes are turned: 4 rows by 4 columns
  for (int i = 0; i < 16; i += 4) {
    const Vec a = KVPAGE_SHUFFLE(rows[i], rows[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    const Vec b = KVPAGE_SHUFFLE(rows[i], rows[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const Vec c = KVPAGE_SHUFFLE(rows[i + 2], rows[i + 3], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    const Vec d = KVPAGE_SHUFFLE(rows[i + 2], rows[i + 3], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    quarters[i] = KVPAGE_SHUFFLE(a, c, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    quarters[i + 1] = KVPAGE_SHUFFLE(a, c, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    quarters[i + 2] = KVPAGE_SHUFFLE(b, d, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    quarters[i + 3] = KVPAGE_SHUFFLE(b, d, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const Vec a = KVPAGE_SHUFFLE(quarters[i], quarters[i + 4], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    const Vec b =
        KVPAGE_SHUFFLE(quarters[i], quarters[i + 4], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const Vec c =
        KVPAGE_SHUFFLE(quarters[i + 8], quarters[i + 12], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    const Vec d =
        KVPAGE_SHUFFLE(quarters[i + 8], quarters[i + 12], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    rows[i] = KVPAGE_SHUFFLE(a, c, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    rows[i + 4] = KVPAGE_SHUFFLE(a, c, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    rows[i + 8] = KVPAGE_SHUFFLE(b, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    rows[i + 12] = KVPAGE_SHUFFLE(b, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
}
#endif

// Writes the panels of keys [begin, end) of a tile, whole vectors of them. While a row is read, `next` of it is
// fetched: blocks are anywhere in memory, so the hardware cannot foresee them.
template <typename T>
void turn_keys(const T* const* keys, const T* const* next, int64_t begin, int64_t end, int64_t size, float* turned) {
  for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes)
    for (int64_t d = 0; d < size; d += kLanes) {
      const int64_t count = least(kLanes, size - d);
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        if (next) __builtin_prefetch(next[j + i] + d, 0, 2);
        square[i] = count == kLanes ? load(keys[j + i] + d) : load_partial(keys[j + i] + d, count);
      }
      turn_square(square);
      float* to = turned + j / kPanel * kPanel * size + d * kPanel + j % kPanel;
      for (int64_t i = 0; i < count; ++i) store(to + i * kPanel, square[i]);
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

// Copies values [begin, end) into panels, the last one filled up with zeros.
template <typename T>
void pack_values(const T* const* values, const T* const* next, int64_t begin, int64_t end, int64_t size,
                 float* packed) {
  for (int64_t j = begin; j < end; ++j)
    for (int64_t d = 0; d < padded(size); d += kLanes) {
      const int64_t count = most(0, least(kLanes, size - d));
      if (next && count) __builtin_prefetch(next[j] + d, 0, 2);
      const Vec value = count == kLanes ? load(values[j] + d) : count ? load_partial(values[j] + d, count) : Vec{};
      store(packed + (d / kPanel * kTileKeys + j) * kPanel + d % kPanel, value);
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
