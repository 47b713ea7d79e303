// The body of BlendKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#pragma once

#include <algorithm>

#include "blend/blend_kernel.h"
#include "quantize/rows_impl.h"

namespace kvpage {
namespace {

// --- neighbours taken apart and put together -----------------------------------------------------------------------

#if KVPAGE_LANES == 4
inline Vec evens(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 2, 4, 6); }
inline Vec odds(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 1, 3, 5, 7); }
inline Vec zip_low(Vec x, Vec y) { return KVPAGE_SHUFFLE(x, y, 0, 4, 1, 5); }
inline Vec zip_high(Vec x, Vec y) { return KVPAGE_SHUFFLE(x, y, 2, 6, 3, 7); }
#elif KVPAGE_LANES == 8
inline Vec evens(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
inline Vec odds(Vec a, Vec b) { return KVPAGE_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
inline Vec zip_low(Vec x, Vec y) { return KVPAGE_SHUFFLE(x, y, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Vec zip_high(Vec x, Vec y) { return KVPAGE_SHUFFLE(x, y, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline Vec evens(Vec a, Vec b) {
  return KVPAGE_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline Vec odds(Vec a, Vec b) {
  return KVPAGE_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline Vec zip_low(Vec x, Vec y) {
  return KVPAGE_SHUFFLE(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Vec zip_high(Vec x, Vec y) {
  return KVPAGE_SHUFFLE(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#endif

// --- rotating ------------------------------------------------------------------------------------------------------

struct Pair {
  Vec x, y;
};

inline Pair rotated(Pair pair, Vec cos, Vec sin) { return {pair.x * cos - pair.y * sin, pair.y * cos + pair.x * sin}; }

template <bool kStreams, typename T>
inline void put(T* to, Vec from) {
  const auto elements = packed(from, to);
  std::byte* const place = reinterpret_cast<std::byte*>(to);
  kStreams ? stream(place, elements) : store_whole(place, elements);
}

template <typename T>
inline void put_partial(T* to, Vec from, int64_t count) {
  const auto elements = packed(from, to);
  std::memcpy(to, &elements, static_cast<size_t>(count) * sizeof(T));
}

// Both vectors are read before one is written: `to` may be `from`.
template <bool kStreams, typename T>
inline void rotate_halves(const T* from, T* to, int64_t n, const float* cos, const float* sin) {
  for_each_vector(
      n,
      [&](int64_t i) {
        const Pair out = rotated({load(from + i), load(from + n + i)}, load(cos + i), load(sin + i));
        put<kStreams>(to + i, out.x);
        put<kStreams>(to + n + i, out.y);
      },
      [&](int64_t i, int64_t count) {
        const Pair out = rotated({load_partial(from + i, count), load_partial(from + n + i, count)},
                                 load_partial(cos + i, count), load_partial(sin + i, count));
        put_partial(to + i, out.x, count);
        put_partial(to + n + i, out.y, count);
      });
}

template <bool kStreams, typename T>
inline void rotate_neighbours(const T* from, T* to, int64_t n, const float* cos, const float* sin) {
  for_each_vector(
      n,
      [&](int64_t i) {
        const Vec a = load(from + 2 * i), b = load(from + 2 * i + kLanes);
        const Pair out = rotated({evens(a, b), odds(a, b)}, load(cos + i), load(sin + i));
        put<kStreams>(to + 2 * i, zip_low(out.x, out.y));
        put<kStreams>(to + 2 * i + kLanes, zip_high(out.x, out.y));
      },
      [&](int64_t i, int64_t count) {
        const int64_t low = std::min<int64_t>(2 * count, kLanes), high = 2 * count - low;
        const Vec a = load_partial(from + 2 * i, low), b = load_partial(from + 2 * i + low, high);
        const Pair out = rotated({evens(a, b), odds(a, b)}, load_partial(cos + i, count), load_partial(sin + i, count));
        put_partial(to + 2 * i, zip_low(out.x, out.y), low);
        put_partial(to + 2 * i + low, zip_high(out.x, out.y), high);
      });
}

template <bool kStreams, typename T>
inline void rotate_head(const T* from, T* to, const RotatedShape& shape, const float* cos, const float* sin) {
  if (shape.is_interleaved) return rotate_neighbours<kStreams>(from, to, shape.num_pairs, cos, sin);
  rotate_halves<kStreams>(from, to, shape.num_pairs, cos, sin);
}

template <typename T>
inline void copy_numbers(const T* from, T* to, int64_t begin, int64_t end) {
  if (from != to && begin < end) std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(T));
}

template <typename T>
void rotate_heads(Heads from, Heads to, int64_t num_heads, int64_t head_size, const RotatedShape& shape,
                  const float* cos, const float* sin, bool streaming) {
  using Packed = decltype(packed(Vec{}, static_cast<T*>(nullptr)));
  for (int64_t h = 0; h < num_heads; ++h) {
    const T* const source = reinterpret_cast<const T*>(from.head(h));
    T* const target = reinterpret_cast<T*>(to.head(h));
    T* const place = target + shape.first;
    copy_numbers(source, target, 0, shape.first);
    copy_numbers(source, target, shape.first + 2 * shape.num_pairs, head_size);
    const int64_t half_bytes = shape.num_pairs * static_cast<int64_t>(sizeof(T));
    if (streaming && can_stream<Packed>(reinterpret_cast<std::byte*>(place), half_bytes))
      rotate_head<true>(source + shape.first, place, shape, cos, sin);
    else
      rotate_head<false>(source + shape.first, place, shape, cos, sin);
  }
}

void rotate(RowType type, Heads from, Heads to, int64_t num_heads, int64_t head_size, const RotatedShape& shape,
            const float* cos, const float* sin, bool streaming) {
  switch (type) {
    case RowType::kBfloat16: return rotate_heads<Bf16>(from, to, num_heads, head_size, shape, cos, sin, streaming);
    case RowType::kFloat16: return rotate_heads<Fp16>(from, to, num_heads, head_size, shape, cos, sin, streaming);
    default: return rotate_heads<float>(from, to, num_heads, head_size, shape, cos, sin, streaming);
  }
}

// --- differences ---------------------------------------------------------------------------------------------------

template <typename T>
float squares(const T* a, const T* b, int64_t size) {
  constexpr int64_t kSums = 4;  // a sum waits for the one before: four run side by side
  Vec sums[kSums] = {};
  int64_t d = 0;
  const auto add = [](Vec& sum, Vec x, Vec y) { sum += (x - y) * (x - y); };
  for (; d + kSums * kLanes <= size; d += kSums * kLanes)
    for (int64_t i = 0; i < kSums; ++i) add(sums[i], load(a + d + i * kLanes), load(b + d + i * kLanes));
  for (; d + kLanes <= size; d += kLanes) add(sums[0], load(a + d), load(b + d));
  if (d < size) add(sums[1], load_partial(a + d, size - d), load_partial(b + d, size - d));
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

float squared_difference(RowType type, const std::byte* a, const std::byte* b, int64_t size) {
  const auto of = [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    return squares(reinterpret_cast<const T*>(a), reinterpret_cast<const T*>(b), size);
  };
  switch (type) {
    case RowType::kBfloat16: return of(static_cast<Bf16*>(nullptr));
    case RowType::kFloat16: return of(static_cast<Fp16*>(nullptr));
    default: return of(static_cast<float*>(nullptr));
  }
}

}  // namespace

const BlendKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, rotate, squared_difference};

}  // namespace kvpage
