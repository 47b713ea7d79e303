// A tile of dot products, its sums in registers: some rows of x times kTileColumns rows of w.
#pragma once

#include <utility>

#include "linear/dot_impl.h"
#include "linear/linear_task.h"

namespace kvpage {
namespace {

// Sums, a row of x each and one of w: 3 * 4 + 3 + 1 = 16 registers, or 6 * 4 + 6 + 1 of 32.
#if KVPAGE_LANES == 16
constexpr int64_t kTileRows = 6;
#else
constexpr int64_t kTileRows = 3;
#endif

template <typename T>
struct Columns {
  const T* rows[kTileColumns];
};

template <typename Dot>
struct Operands {
  const typename Dot::Staged* x;
  int64_t x_stride;  // elements
  int64_t size;      // of the K block
  Columns<typename Dot::Weight> columns;
  Columns<typename Dot::Weight>
      ends;  // the last elements of each row, where they fill no vector: with zeros after them
  Columns<std::byte> next;  // read soon
  int64_t next_size;        // bytes of an element of `next`
  float* kept;                         // where w goes as fp32, [kTileColumns, x_stride]; or null
};

struct Sums {
  float* data;  // [row][kPanelColumns]
  bool adds;    // to what is there
};

inline void put_sums(Vec lowest, float* to, bool adds) {
  typedef float Four __attribute__((vector_size(16)));
  Four four, before;
  std::memcpy(&four, &lowest, sizeof(four));
  if (adds) {
    std::memcpy(&before, to, sizeof(before));
    four += before;
  }
  std::memcpy(to, &four, sizeof(four));
}

// call(0), call(1) ... as constants: so each sum is a register from beginning to end.
template <int kCount, typename Call>
__attribute__((always_inline)) inline void for_each_constant(const Call& call) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (call(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// How a tile treats w beside multiplying it.
enum class Pass { kReads, kKeeps, kFetches };  // kKeeps: writes it to `kept`; kFetches: fetches `next` at the same pace

// The loop over K is as bare as it can be: anything else in it costs a tenth of the speed.
template <int kRows, Pass kPass, typename Dot>
__attribute__((noinline)) void dot_tile(const Operands<Dot>& operands, const Sums& sums) {
  Vec total[kRows][kTileColumns];
  for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
    for_each_constant<kTileColumns>([&](auto j) __attribute__((always_inline)) { total[r][j] = Vec{}; });
  });
  const auto* const x = operands.x;
  const int64_t x_stride = operands.x_stride, size = operands.size, next_size = operands.next_size;
  const auto columns = operands.columns, next = operands.next;
  float* const kept = operands.kept;
  const auto add = [&](int64_t k, const auto& rows_of_w, int64_t at) __attribute__((always_inline)) {
    typename Dot::Factor rows[kRows];
    for_each_constant<kRows>([&](auto r)
                                 __attribute__((always_inline)) { rows[r] = Dot::load_x(x + r * x_stride + k); });
    for_each_constant<kTileColumns>([&](auto j) __attribute__((always_inline)) {
      const typename Dot::Factor column = Dot::load_w(rows_of_w.rows[j] + at);
      if constexpr (kPass == Pass::kKeeps) store(kept + j * x_stride + k, column);
      for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
        total[r][j] = Dot::multiply_add(total[r][j], rows[r], column);
      });
    });
  };
  int64_t k = 0;
  if constexpr (kPass == Pass::kFetches) {
    constexpr int64_t kLine = 64 / sizeof(typename Dot::Weight);
    for (; k + kLine <= size; k += kLine) {
      for_each_constant<kTileColumns>(
          [&](auto j) __attribute__((always_inline)) { __builtin_prefetch(next.rows[j] + k * next_size); });
      for_each_constant<kLine / Dot::kWidth>(
          [&](auto i) __attribute__((always_inline)) { add(k + i * Dot::kWidth, columns, k + i * Dot::kWidth); });
    }
  }
  for (; k + Dot::kWidth <= size; k += Dot::kWidth) add(k, columns, k);
  if (k < size) add(k, operands.ends, 0);
  const bool adds = sums.adds;
  float* const to = sums.data;
  for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
    put_sums(sum_lanes(total[r][0], total[r][1], total[r][2], total[r][3]), to + r * kPanelColumns, adds);
  });
}

}  // namespace
}  // namespace kvpage
