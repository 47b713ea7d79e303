// One step along K of a product with a turned weight: some rows of w, a word of x for each row of x.
//
//   WidenedStep<T>   one row of w, as fp32: one fused multiply-add
//   PairStep         two rows of w, whose numbers lie beside each other in a word: vdpbf16ps, or a model of it
//
// A Step has: kDepth, its rows of w; Word, of x in scratch; Factor, a vector of w's columns.
#pragma once

#include "linear/experts/turned_kernel.h"
#include "quantize/rows_impl.h"
#include "simd/pairs.h"

namespace kvpage {
namespace {

template <typename T>
inline Vec load_count(const std::byte* from, int64_t count) {
  const T* const elements = reinterpret_cast<const T*>(from);
  return count == kLanes ? load(elements) : load_partial(elements, count);
}

template <typename T>
struct WidenedStep {
  using Element = T;
  using Word = float;
  using Factor = Vec;
  static constexpr int64_t kDepth = 1;

  // Columns of the rows of w from `from` on, of which there are `num_rows`. Past `count` columns there are zeros.
  static Factor factor(const std::byte* from, int64_t, int64_t, int64_t count) { return load_count<T>(from, count); }
  static Vec add(Vec total, Factor factor, Word x) { return total + factor * x; }

  static void stage(const std::byte* from, int64_t count, Word* to) {
    const T* const elements = reinterpret_cast<const T*>(from);
    for_each_vector(
        count, [&](int64_t at) { store(to + at, load(elements + at)); },
        [&](int64_t at, int64_t rest) {
          const Vec last = load_partial(elements + at, rest);
          std::memcpy(to + at, &last, static_cast<size_t>(rest) * sizeof(float));
        });
  }
};

struct PairStep {
  using Element = Bf16;
  using Word = uint32_t;
  using Factor = WordVec;
  static constexpr int64_t kDepth = 2;

  static Factor factor(const std::byte* from, int64_t stride, int64_t num_rows, int64_t count) {
    const WordVec first = bit_cast<WordVec>(load_count<Bf16>(from, count)) >> 16;
    return num_rows < 2 ? first : first | bit_cast<WordVec>(load_count<Bf16>(from + stride, count));
  }
  static Vec add(Vec total, Factor factor, Word x) { return dot_pairs(total, factor, x - WordVec{}); }

  static void stage(const std::byte* from, int64_t count, Word* to) {
    if (count % kDepth != 0) to[count / kDepth] = 0;
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(Bf16));
  }
};

using Bf16Step = std::conditional_t<kHasPairs, PairStep, WidenedStep<Bf16>>;

}  // namespace
}  // namespace kvpage
