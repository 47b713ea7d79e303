// The body of TurnedKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#pragma once

#include <algorithm>

#include "linear/experts/turned_tile_impl.h"
#include "linear/gate_impl.h"

namespace kvpage {
namespace {

constexpr int kPassSteps = 8;
constexpr int64_t kPassRows = 24;  // at once, whose sums stay in the first cache

// --- few rows of x: w is read once, as it lies -----------------------------------------------------------------------

// Rows of x, of which there are few.
struct RowRange {
  int64_t begin, end;
};

// Some steps from `step` on, `count` columns from `column` on, for some rows of x.
template <int kSteps, typename Step>
inline void add_part(const TurnedTask& task, const RowRange& rows, int64_t step, int64_t column, int64_t count) {
  constexpr int64_t kBytes = sizeof(typename Step::Element);
  typename Step::Factor factors[kSteps];
  for (int i = 0; i < kSteps; ++i) {
    const int64_t k = (step + i) * Step::kDepth;
    factors[i] = Step::factor(task.w + k * task.w_stride + column * kBytes, task.w_stride, task.size - k, count);
  }
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* const sums = task.sums + row * kTurnedColumns + column;
    const auto* const x = reinterpret_cast<const typename Step::Word*>(task.x) + row * task.x_stride + step;
    Vec total = load(sums);
    for (int i = 0; i < kSteps; ++i) total = Step::add(total, factors[i], x[i]);
    store(sums, total);
  }
}

template <int kSteps, typename Step>
void add_pass(const TurnedTask& task, const RowRange& rows, int64_t step) {
  for_each_vector(
      task.num_columns, [&](int64_t column) { add_part<kSteps, Step>(task, rows, step, column, kLanes); },
      [&](int64_t column, int64_t count) { add_part<kSteps, Step>(task, rows, step, column, count); });
}

template <typename Step>
void add_all_in_passes(const TurnedTask& task, int64_t num_steps) {
  for (int64_t begin = 0; begin < task.num_rows; begin += kPassRows) {
    const RowRange rows{begin, std::min(begin + kPassRows, task.num_rows)};
    int64_t step = 0;
    for (; step + kPassSteps <= num_steps; step += kPassSteps) add_pass<kPassSteps, Step>(task, rows, step);
    for (; step < num_steps; ++step) add_pass<1, Step>(task, rows, step);
  }
}

// --- both ------------------------------------------------------------------------------------------------------------

// Factors in scratch pay for many rows, and where it takes something to make them.
template <typename Step>
void add_all(const TurnedTask& task) {
  const int64_t num_steps = (task.size + Step::kDepth - 1) / Step::kDepth;
  if constexpr (Step::kDepth > 1)
    if (task.num_rows > kPassRows) return add_all_by_tiles<Step>(task, num_steps);
  add_all_in_passes<Step>(task, num_steps);
}

template <typename Step>
void multiply_typed(const TurnedTask& task) {
  using T = typename Step::Element;
  std::memset(task.sums, 0, static_cast<size_t>(task.num_rows * kTurnedColumns) * sizeof(float));
  add_all<Step>(task);
  for (int64_t row = 0; row < task.num_rows; ++row)
    finish_row(Activation::kNone, task.sums + row * kTurnedColumns, reinterpret_cast<const T*>(task.bias),
               task.num_columns, reinterpret_cast<T*>(task.out + row * task.out_stride));
}

template <typename Step>
void stage_typed(const std::byte* from, int64_t count, std::byte* to) {
  Step::stage(from, count, reinterpret_cast<typename Step::Word*>(to));
}

void stage(RowType type, const std::byte* from, int64_t count, std::byte* to) {
  switch (type) {
    case RowType::kBfloat16: return stage_typed<Bf16Step>(from, count, to);
    case RowType::kFloat16: return stage_typed<WidenedStep<Fp16>>(from, count, to);
    default: return stage_typed<WidenedStep<float>>(from, count, to);
  }
}

void multiply(const TurnedTask& task) {
  switch (task.type) {
    case RowType::kBfloat16: return multiply_typed<Bf16Step>(task);
    case RowType::kFloat16: return multiply_typed<WidenedStep<Fp16>>(task);
    default: return multiply_typed<WidenedStep<float>>(task);
  }
}

}  // namespace

const TurnedKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, stage, multiply};

}  // namespace kvpage
