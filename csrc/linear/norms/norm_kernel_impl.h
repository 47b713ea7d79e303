// The body of NormKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#pragma once

#include "linear/norms/norm_kernel.h"
#include "quantize/rows_impl.h"

namespace kvpage {
namespace {

template <typename T>
inline void put(T* to, Vec from, int64_t count) {
  const auto elements = packed(from, to);
  std::memcpy(to, &elements, static_cast<size_t>(count) * sizeof(T));
}

template <typename T>
inline Vec get(const T* from, int64_t count) {
  return count == kLanes ? load(from) : load_partial(from, count);
}

template <typename T>
inline Vec rounded(Vec from) {
  const auto elements = packed(from, static_cast<const T*>(nullptr));
  return load(reinterpret_cast<const T*>(&elements));
}

// each(d, count): whole vectors with a constant count, then the rest.
template <typename Each>
inline void for_each_part(int64_t size, const Each& each) {
  for_each_vector(size, [&](int64_t d) { each(d, kLanes); }, [&](int64_t d, int64_t count) { each(d, count); });
}

// The sum of squares of h, which goes to `sum` where there is a residual. Four sums, so that none waits for the last.
template <typename T>
float sum_of_squares(const NormRow& row) {
  const T *x = reinterpret_cast<const T*>(row.x), *residual = reinterpret_cast<const T*>(row.residual);
  T* const sum = reinterpret_cast<T*>(row.sum);
  Vec totals[4] = {};
  for_each_part(row.size, [&](int64_t d, int64_t count) {
    Vec h = get(x + d, count);
    if (residual) {
      h = rounded<T>(h + get(residual + d, count));
      put(sum + d, h, count);
    }
    totals[d / kLanes % 4] += h * h;
  });
  return sum_lanes((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

template <typename T>
void normalize_typed(const NormRow& row) {
  const float mean = sum_of_squares<T>(row) / static_cast<float>(row.size);
  const float factor = 1.0f / std::sqrt(mean + row.eps);
  const T *h = reinterpret_cast<const T*>(row.residual ? row.sum : row.x),
          *weight = reinterpret_cast<const T*>(row.weight);
  T* const out = reinterpret_cast<T*>(row.out);
  const bool rounds = row.order == NormOrder::kRoundThenScale;
  for_each_part(row.size, [&](int64_t d, int64_t count) {
    Vec normal = get(h + d, count) * factor;
    if (rounds) normal = rounded<T>(normal);
    put(out + d, normal * (get(weight + d, count) + row.offset), count);
  });
}

void normalize(RowType type, const NormRow& row) {
  switch (type) {
    case RowType::kBfloat16: return normalize_typed<Bf16>(row);
    case RowType::kFloat16: return normalize_typed<Fp16>(row);
    default: return normalize_typed<float>(row);
  }
}

}  // namespace

const NormKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, normalize};

}  // namespace kvpage
