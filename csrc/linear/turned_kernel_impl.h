// The body of TurnedKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#pragma once

#include "linear/gate_impl.h"
#include "linear/turned_kernel.h"

namespace kvpage {
namespace {

constexpr int kTurnedDepth = 8;

// kDepth rows of w from `k` on, `count` columns from `column` on, for all rows of x. Past the last whole vector the
// elements are read with zeros after them.
template <int kDepth, typename T>
inline void add_part(const TurnedTask& task, int64_t k, int64_t column, int64_t count) {
  Vec factors[kDepth];
  for (int i = 0; i < kDepth; ++i) {
    const T* const from = reinterpret_cast<const T*>(task.w + (k + i) * task.w_stride) + column;
    factors[i] = count == kLanes ? load(from) : load_partial(from, count);
  }
  for (int64_t row = 0; row < task.num_rows; ++row) {
    float* const sums = task.sums + row * kTurnedColumns + column;
    const float* const x = task.x + row * task.x_stride + k;
    Vec total = load(sums);
    for (int i = 0; i < kDepth; ++i) total = total + factors[i] * x[i];
    store(sums, total);
  }
}

template <int kDepth, typename T>
void add_rows(const TurnedTask& task, int64_t k) {
  for_each_vector(
      task.num_columns, [&](int64_t column) { add_part<kDepth, T>(task, k, column, kLanes); },
      [&](int64_t column, int64_t count) { add_part<kDepth, T>(task, k, column, count); });
}

template <typename T>
void multiply_typed(const TurnedTask& task) {
  std::memset(task.sums, 0, static_cast<size_t>(task.num_rows * kTurnedColumns) * sizeof(float));
  int64_t k = 0;
  for (; k + kTurnedDepth <= task.size; k += kTurnedDepth) add_rows<kTurnedDepth, T>(task, k);
  for (; k < task.size; ++k) add_rows<1, T>(task, k);
  for (int64_t row = 0; row < task.num_rows; ++row)
    finish_row(Activation::kNone, task.sums + row * kTurnedColumns, reinterpret_cast<const T*>(task.bias),
               task.num_columns, reinterpret_cast<T*>(task.out + row * task.out_stride));
}

template <typename T>
void widen_typed(const std::byte* from, int64_t count, float* to) {
  const T* const elements = reinterpret_cast<const T*>(from);
  for_each_vector(
      count, [&](int64_t at) { store(to + at, load(elements + at)); },
      [&](int64_t at, int64_t rest) {
        const Vec last = load_partial(elements + at, rest);
        std::memcpy(to + at, &last, static_cast<size_t>(rest) * sizeof(float));
      });
}

void widen(RowType type, const std::byte* from, int64_t count, float* to) {
  switch (type) {
    case RowType::kBfloat16: return widen_typed<Bf16>(from, count, to);
    case RowType::kFloat16: return widen_typed<Fp16>(from, count, to);
    default: return widen_typed<float>(from, count, to);
  }
}

void multiply(const TurnedTask& task) {
  switch (task.type) {
    case RowType::kBfloat16: return multiply_typed<Bf16>(task);
    case RowType::kFloat16: return multiply_typed<Fp16>(task);
    default: return multiply_typed<float>(task);
  }
}

}  // namespace

const TurnedKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, widen, multiply};

}  // namespace kvpage
