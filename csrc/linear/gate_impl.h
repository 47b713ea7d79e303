// The end of a product: its bias, or a gate's activation, and the rounding to the result's type.
#pragma once

#include "linear/linear_task.h"
#include "quantize/rows_impl.h"

namespace kvpage {
namespace {

inline Vec silu(Vec x) {
  const Vec power = exp_negative(x < 0.0f ? x : -x);
  return x * ((x < 0.0f ? power : splat(1.0f)) / (1.0f + power));
}

inline Vec gelu_tanh(Vec x) { return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x))); }

// `values(at, count)` gives the vector of results from column `at` on.
template <typename T, typename Values>
inline void finish_with(int64_t num_columns, T* to, const Values& values) {
  for_each_vector(
      num_columns, [&](int64_t at) { store_whole(reinterpret_cast<std::byte*>(to + at), packed(values(at), to)); },
      [&](int64_t at, int64_t count) {
        const auto last = packed(values(at), to);
        std::memcpy(to + at, &last, static_cast<size_t>(count) * sizeof(T));
      });
}

// Of a tile's four sums two are the gate's and two the other weight's: (g, g, u, u), (g, g, u, u) ... Returns the pairs
// that begin at kFirst: 0 for the gate's, 2 for the others.
template <int kFirst>
inline Vec pairs(const float* sums) {
  constexpr int i = kFirst;
  const Vec a = load(sums), b = load(sums + kLanes);
#if KVPAGE_LANES == 4
  return KVPAGE_SHUFFLE(a, b, i, i + 1, i + 4, i + 5);
#elif KVPAGE_LANES == 8
  return KVPAGE_SHUFFLE(a, b, i, i + 1, i + 4, i + 5, i + 8, i + 9, i + 12, i + 13);
#else
  return KVPAGE_SHUFFLE(a, b, i, i + 1, i + 4, i + 5, i + 8, i + 9, i + 12, i + 13, i + 16, i + 17, i + 20, i + 21,
                        i + 24, i + 25, i + 28, i + 29);
#endif
}

// activate(gate) * up, of the results from a column on.
template <typename T, typename Activate>
inline void finish_gated(const float* sums, int64_t num_columns, T* to, const Activate& activate) {
  finish_with(num_columns, to, [&](int64_t at) { return activate(pairs<0>(sums + 2 * at)) * pairs<2>(sums + 2 * at); });
}

// The same of gates and others that lie apart.
template <typename T>
void finish_beside(Activation activation, const float* gate, const float* up, int64_t num_columns, T* to) {
  const auto finish = [&](const auto& activate) {
    finish_with(num_columns, to, [&](int64_t at) { return activate(load(gate + at)) * load(up + at); });
  };
  if (activation == Activation::kSilu) return finish(silu);
  finish(gelu_tanh);
}

template <typename T>
void finish_row(Activation activation, const float* sums, const T* bias, int64_t num_columns, T* to) {
  switch (activation) {
    case Activation::kSilu: return finish_gated(sums, num_columns, to, silu);
    case Activation::kGeluTanh: return finish_gated(sums, num_columns, to, gelu_tanh);
    default: break;
  }
  if (!bias) return finish_with(num_columns, to, [&](int64_t at) { return load(sums + at); });
  finish_with(num_columns, to, [&](int64_t at) {
    const int64_t count = num_columns - at < kLanes ? num_columns - at : kLanes;
    return load(sums + at) + load_partial(bias + at, count);
  });
}

}  // namespace
}  // namespace kvpage
