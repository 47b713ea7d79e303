// Many rows of x times some columns of a turned weight, whose sums are in registers while a block of K passes.
//
//                 kStrip columns
//   w   k ..      ═════════════   kBlockSteps steps of them, one after the other in scratch, as factors
//   x             kHighest rows at a time, all of which read these factors out of the first cache
//
// All strips of a panel are put there at once, so that w is read along its rows.
#pragma once

#include <type_traits>

#include "linear/dot_tile_impl.h"
#include "linear/experts/turned_step_impl.h"

namespace kvpage {
namespace {

// Sums, factors, and a word of x: 6 * 4 + 4 + 1 of 32 registers, or 6 * 2 + 2 + 1 of 16.
constexpr int64_t kHighest = 6;
constexpr int64_t kStripVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kStrip = kStripVectors * kLanes;
constexpr int64_t kBlockSteps = kTurnedPacked / kTurnedColumns;
static_assert(kTurnedColumns % kStrip == 0);

template <typename Step>
struct TurnedTile {
  const typename Step::Factor* factors;  // [num_steps][kStripVectors]
  const typename Step::Word* x;
  int64_t x_stride, num_steps;
  float* sums;
};

template <int kRows, typename Step>
__attribute__((noinline)) void add_tile(const TurnedTile<Step>& tile) {
  Vec total[kRows][kStripVectors];
  for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
    for_each_constant<kStripVectors>([&](auto v) __attribute__((always_inline)) {
      total[r][v] = load(tile.sums + r * kTurnedColumns + v * kLanes);
    });
  });
  const auto* factors = tile.factors;
  const auto* const x = tile.x;
  const int64_t stride = tile.x_stride, num_steps = tile.num_steps;
  for (int64_t step = 0; step < num_steps; ++step, factors += kStripVectors)
    for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
      const auto word = x[r * stride + step];
      for_each_constant<kStripVectors>(
          [&](auto v) __attribute__((always_inline)) { total[r][v] = Step::add(total[r][v], factors[v], word); });
    });
  for_each_constant<kRows>([&](auto r) __attribute__((always_inline)) {
    for_each_constant<kStripVectors>([&](auto v) __attribute__((always_inline)) {
      store(tile.sums + r * kTurnedColumns + v * kLanes, total[r][v]);
    });
  });
}

template <typename Step>
void add_rows_of(int64_t num_rows, const TurnedTile<Step>& tile) {
  switch (num_rows) {
    case 6: return add_tile<6>(tile);
    case 5: return add_tile<5>(tile);
    case 4: return add_tile<4>(tile);
    case 3: return add_tile<3>(tile);
    case 2: return add_tile<2>(tile);
    default: return add_tile<1>(tile);
  }
}

// Steps [begin, end) of all columns, strip by strip, with zeros after the last column of w.
template <typename Step>
void pack_block(const TurnedTask& task, int64_t begin, int64_t end, typename Step::Factor* to) {
  constexpr int64_t kBytes = sizeof(typename Step::Element);
  const int64_t num_vectors = (task.num_columns + kStrip - 1) / kStrip * kStripVectors;
  for (int64_t step = begin; step < end; ++step) {
    const int64_t k = step * Step::kDepth;
    const std::byte* const row = task.w + k * task.w_stride;
    for (int64_t vector = 0; vector < num_vectors; ++vector) {
      const int64_t column = vector * kLanes, count = std::min<int64_t>(task.num_columns - column, kLanes);
      const int64_t place = (vector / kStripVectors * (end - begin) + step - begin) * kStripVectors;
      to[place + vector % kStripVectors] =
          count <= 0 ? typename Step::Factor{}
                     : Step::factor(row + column * kBytes, task.w_stride, task.size - k, count);
    }
  }
}

// All rows of the task, in tiles of nearly the same height. x: from the block's first step on.
template <typename Step>
void add_strip(const TurnedTask& task, const typename Step::Factor* factors, const typename Step::Word* x,
               int64_t num_steps, float* sums) {
  const int64_t num_tiles = (task.num_rows + kHighest - 1) / kHighest;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t height = task.num_rows / num_tiles + (tile < task.num_rows % num_tiles);
    add_rows_of<Step>(height, {factors, x, task.x_stride, num_steps, sums});
    x += height * task.x_stride;
    sums += height * kTurnedColumns;
  }
}

template <typename Step>
void add_all_by_tiles(const TurnedTask& task, int64_t num_steps) {
  auto* const factors = reinterpret_cast<typename Step::Factor*>(task.packed);
  const auto* const x = reinterpret_cast<const typename Step::Word*>(task.x);
  for (int64_t begin = 0; begin < num_steps; begin += kBlockSteps) {
    const int64_t count = std::min(kBlockSteps, num_steps - begin);
    pack_block<Step>(task, begin, begin + count, factors);
    for (int64_t strip = 0; strip * kStrip < task.num_columns; ++strip)
      add_strip<Step>(task, factors + strip * count * kStripVectors, x + begin, count, task.sums + strip * kStrip);
  }
}

}  // namespace
}  // namespace kvpage
