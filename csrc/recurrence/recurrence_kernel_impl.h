// The body of RecurrenceKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#pragma once

#include "quantize/rows_impl.h"
#include "recurrence/recurrence_kernel.h"

namespace kvpage {
namespace {

constexpr int kVectors = kRecurrenceColumns / kLanes;
struct Columns {
  Vec parts[kVectors];
};

inline Columns load_columns(const float* from) {
  Columns to;
  for (int i = 0; i < kVectors; ++i) to.parts[i] = load(from + i * kLanes);
  return to;
}

// The first `count` of them, and zeros.
inline Columns load_some(const float* from, int64_t count) {
  if (count == kRecurrenceColumns) return load_columns(from);
  float elements[kRecurrenceColumns] = {};
  std::memcpy(elements, from, static_cast<size_t>(count) * sizeof(float));
  return load_columns(elements);
}

// The factor that a row of the state decays by: one vector for all columns, or one for each.
template <Decay kDecay>
class Decays {
 public:
  explicit Decays(const RecurrenceStep& step) : step_(step) {
    if constexpr (kDecay == Decay::kOfHead) of_head_ = exp_negative(splat(step.decay[0]));
    if constexpr (kDecay == Decay::kOfElement) of_columns_ = load_some(step.decay, step.num_columns);
    if constexpr (kDecay == Decay::kOfKey)
      for_each_vector(
          step.num_keys, [&](int64_t k) { store(step.decays + k, exp_negative(load(step.decay + k))); },
          [&](int64_t k, int64_t count) {
            const Vec rest = exp_negative(load_partial(step.decay + k, count));
            std::memcpy(step.decays + k, &rest, static_cast<size_t>(count) * sizeof(float));
          });
  }

  Vec of(int64_t key, int part) const {
    if constexpr (kDecay == Decay::kOfHead) return of_head_;
    if constexpr (kDecay == Decay::kOfKey) return splat(step_.decays[key]);
    return exp_negative(of_columns_.parts[part] * load(step_.rates + key * kRecurrenceColumns + part * kLanes));
  }

 private:
  const RecurrenceStep& step_;
  Vec of_head_;
  Columns of_columns_;
};

template <Decay kDecay>
Columns corrected(const RecurrenceStep& step, const Decays<kDecay>& decays, Columns value) {
  Columns predicted = {};
  for (int64_t k = 0; k < step.num_keys; ++k) {
    const Columns row = load_columns(step.state + k * kRecurrenceColumns);
    for (int i = 0; i < kVectors; ++i) predicted.parts[i] += row.parts[i] * decays.of(k, i) * step.key[k];
  }
  for (int i = 0; i < kVectors; ++i) value.parts[i] = (value.parts[i] - predicted.parts[i]) * step.factor;
  return value;
}

template <Decay kDecay, bool kCorrects>
void step_of(const RecurrenceStep& step) {
  const Decays<kDecay> decays(step);
  Columns added = load_some(step.value, step.num_columns), out = {};
  if constexpr (kCorrects) added = corrected(step, decays, added);
  for (int64_t k = 0; k < step.num_keys; ++k) {
    float* const row = step.state + k * kRecurrenceColumns;
    for (int i = 0; i < kVectors; ++i) {
      const Vec state = load(row + i * kLanes) * decays.of(k, i) + added.parts[i] * step.key[k];
      store(row + i * kLanes, state);
      out.parts[i] += state * step.query[k];
    }
  }
  std::memcpy(step.out, &out, static_cast<size_t>(step.num_columns) * sizeof(float));
}

template <Decay kDecay>
void step_with(bool corrects, const RecurrenceStep& step) {
  return corrects ? step_of<kDecay, true>(step) : step_of<kDecay, false>(step);
}

void step(Decay decay, bool corrects, const RecurrenceStep& step) {
  switch (decay) {
    case Decay::kOfKey: return step_with<Decay::kOfKey>(corrects, step);
    case Decay::kOfElement: return step_with<Decay::kOfElement>(corrects, step);
    default: return step_with<Decay::kOfHead>(corrects, step);
  }
}

}  // namespace

const RecurrenceKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, step};

}  // namespace kvpage
