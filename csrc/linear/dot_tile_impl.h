// A tile of dot products, its sums in registers: some rows of x times kTileColumns rows of w.
#pragma once

#include <utility>

#include "linear/linear_kernel.h"
#include "quantize/rows_impl.h"

namespace kvpage {
namespace {

// Sums, a row of x each and one of w: 3 * 4 + 3 + 1 = 16 registers, or 6 * 4 + 6 + 1 of 32.
#if KVPAGE_LANES == 16
constexpr int64_t kTileRows = 6;
#else
constexpr int64_t kTileRows = 3;
#endif
constexpr int64_t kStep = 64;  // elements between two looks at what is to be fetched

template <typename T>
struct Columns {
  const T* rows[kTileColumns];
};

// Memory that is read soon, fetched while a tile is computed, at the same pace.
struct Fetch {
  const std::byte* rows[kTileColumns];
  int64_t count;

  void run(int64_t byte, int64_t num_bytes) const {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(rows[i] + byte + at, 0, 2);
  }
};

template <typename T>
struct Operands {
  const float* x;
  int64_t x_stride;  // elements
  int64_t size;      // of the K block
  Columns<T> columns;
  Columns<T> ends;  // the last elements of each row, where they fill no vector: with zeros after them
  Fetch fetch;
  float* kept;  // where w goes as fp32, [kTileColumns, x_stride]; or null
};

struct Sums {
  float* data;    // [row][kPanelColumns]
  int64_t upper;  // floats from the first half of a tile's sums to the second half
  bool adds;      // to what is there
};

// Adds or puts the lowest four lanes, two by two.
inline void put_sums(Vec four, const Sums& sums, int64_t row) {
  typedef float Pair __attribute__((vector_size(8)));
  float* const to = sums.data + row * kPanelColumns;
  for (int half = 0; half < 2; ++half) {
    float* const place = to + half * sums.upper;
    Pair pair, before;
    std::memcpy(&pair, reinterpret_cast<const std::byte*>(&four) + half * sizeof(pair), sizeof(pair));
    if (sums.adds) {
      std::memcpy(&before, place, sizeof(pair));
      pair += before;
    }
    std::memcpy(place, &pair, sizeof(pair));
  }
}

// call(0), call(1) ... as constants: so each sum is a register from beginning to end.
template <int kCount, typename Call>
__attribute__((always_inline)) inline void for_each_constant(const Call& call) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (call(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

template <int kRows, bool kKeeps, typename T>
inline void dot_tile_keeping(const Operands<T>& operands, const Sums& sums) {
  Vec total[kRows][kTileColumns];
  for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
    for_each_constant<kTileColumns>([&](auto j) __attribute__((always_inline)) { total[r][j] = Vec{}; });
  });
  const float* const x = operands.x;
  const int64_t x_stride = operands.x_stride, size = operands.size;
  const auto add = [&](int64_t k, const Columns<T>& columns, int64_t at) __attribute__((always_inline)) {
    Vec rows[kRows];
    for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) { rows[r] = load(x + r * x_stride + k); });
    for_each_constant<kTileColumns>([&](auto j) __attribute__((always_inline)) {
      const Vec column = load(columns.rows[j] + at);
      if constexpr (kKeeps) store(operands.kept + j * x_stride + k, column);
      for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) { total[r][j] += rows[r] * column; });
    });
  };
  int64_t k = 0;
  for (; k + kStep <= size; k += kStep) {
    operands.fetch.run(k * sizeof(T), kStep * sizeof(T));
    for (int64_t i = 0; i < kStep; i += kLanes) add(k + i, operands.columns, k + i);
  }
  for (; k + kLanes <= size; k += kLanes) add(k, operands.columns, k);
  if (k < size) add(k, operands.ends, 0);
  for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
    put_sums(sum_lanes(total[r][0], total[r][1], total[r][2], total[r][3]), sums, r);
  });
}

template <int kRows, typename T>
void dot_tile(const Operands<T>& operands, const Sums& sums) {
  if constexpr (sizeof(T) < sizeof(float)) {
    if (operands.kept) return dot_tile_keeping<kRows, true>(operands, sums);
  }
  dot_tile_keeping<kRows, false>(operands, sums);
}

}  // namespace
}  // namespace kvpage
