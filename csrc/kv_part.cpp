#include "kv_part.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvpage {
namespace {

constexpr int64_t kRunBytes = 16;  // of K in the backend "paged"

// Turns rows into columns: to[c * to_stride + r] = from[r * from_stride + c], strides in bytes, in tiles that stay in
// the first-level cache.
template <typename T>
void transpose(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride, int64_t num_rows,
               int64_t num_columns) {
  constexpr int64_t kTile = 16;
  for (int64_t first = 0; first < num_columns; first += kTile) {
    const int64_t last = std::min(first + kTile, num_columns);
    for (int64_t r = 0; r < num_rows; ++r)
      for (int64_t c = first; c < last; ++c)
        std::memcpy(to + c * to_stride + r * static_cast<int64_t>(sizeof(T)),
                    from + r * from_stride + c * static_cast<int64_t>(sizeof(T)), sizeof(T));
  }
}

#ifdef __SSE2__
inline __m128i load_row(const std::byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

template <bool kStreaming>
inline void store_row(std::byte* to, __m128i row) {
  if constexpr (kStreaming) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), row);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), row);
  }
}

// 8 rows of 8 elements of 2 bytes, in three steps of interleaving.
template <bool kStreaming>
void transpose_8x8(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = load_row(from + i * from_stride);
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
    a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    store_row<kStreaming>(to + 2 * i * to_stride, _mm_unpacklo_epi16(a[i], a[i + 4]));
    store_row<kStreaming>(to + (2 * i + 1) * to_stride, _mm_unpackhi_epi16(a[i], a[i + 4]));
  }
}

// 16 rows of 16 bytes, in four.
template <bool kStreaming>
void transpose_16x16(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride) {
  __m128i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = load_row(from + i * from_stride);
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
      b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
    }
    std::copy(b, b + 16, a);
  }
  for (int i = 0; i < 16; ++i) store_row<kStreaming>(to + i * to_stride, a[i]);
}

// 4 rows of 4 elements of 4 bytes, in two.
template <bool kStreaming>
void transpose_4x4(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride) {
  __m128i a[4], b[4];
  for (int i = 0; i < 4; ++i) a[i] = load_row(from + i * from_stride);
  for (int i = 0; i < 2; ++i) {
    b[2 * i] = _mm_unpacklo_epi32(a[i], a[i + 2]);
    b[2 * i + 1] = _mm_unpackhi_epi32(a[i], a[i + 2]);
  }
  for (int i = 0; i < 2; ++i) {
    store_row<kStreaming>(to + 2 * i * to_stride, _mm_unpacklo_epi32(b[i], b[i + 2]));
    store_row<kStreaming>(to + (2 * i + 1) * to_stride, _mm_unpackhi_epi32(b[i], b[i + 2]));
  }
}

template <typename T, bool kStreaming>
void transpose_square(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride) {
  if constexpr (sizeof(T) == 1) transpose_16x16<kStreaming>(to, to_stride, from, from_stride);
  if constexpr (sizeof(T) == 2) transpose_8x8<kStreaming>(to, to_stride, from, from_stride);
  if constexpr (sizeof(T) == 4) transpose_4x4<kStreaming>(to, to_stride, from, from_stride);
}

// As transpose, square by square; what does not fill one goes element by element.
template <typename T, bool kStreaming>
void transpose_fast(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride, int64_t num_rows,
                    int64_t num_columns) {
  constexpr int64_t kBytes = sizeof(T), kSide = 16 / kBytes;
  const int64_t whole_rows = num_rows / kSide * kSide, whole_columns = num_columns / kSide * kSide;
  for (int64_t c = 0; c < whole_columns; c += kSide)
    for (int64_t r = 0; r < whole_rows; r += kSide)
      transpose_square<T, kStreaming>(to + c * to_stride + r * kBytes, to_stride, from + r * from_stride + c * kBytes, from_stride);
  transpose<T>(to + whole_columns * to_stride, to_stride, from + whole_columns * kBytes, from_stride, whole_rows,
               num_columns - whole_columns);
  transpose<T>(to + whole_rows * kBytes, to_stride, from + whole_rows * from_stride, from_stride,
               num_rows - whole_rows, num_columns);
}
#else
template <typename T, bool kStreaming>
void transpose_fast(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride, int64_t num_rows,
                    int64_t num_columns) {
  transpose<T>(to, to_stride, from, from_stride, num_rows, num_columns);
}
#endif

bool is_aligned(const std::byte* address, int64_t stride) {
  return reinterpret_cast<uintptr_t>(address) % kRunBytes == 0 && stride % kRunBytes == 0;
}

template <bool kStreaming>
void transpose_elements(int64_t bytes, std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride,
                        int64_t num_rows, int64_t num_columns) {
  switch (bytes) {
    case 1: return transpose_fast<uint8_t, kStreaming>(to, to_stride, from, from_stride, num_rows, num_columns);
    case 2: return transpose_fast<uint16_t, kStreaming>(to, to_stride, from, from_stride, num_rows, num_columns);
    case 4: return transpose_fast<uint32_t, kStreaming>(to, to_stride, from, from_stride, num_rows, num_columns);
    default: return transpose<uint64_t>(to, to_stride, from, from_stride, num_rows, num_columns);
  }
}

// copy(cache, row, bytes) for each run of each token; what fills a run of 16 bytes with a constant length.
template <typename Copy>
void for_each_run(const KVPart& part, int64_t count, int64_t size, int64_t row_stride, const Copy& copy) {
  const int64_t run_bytes = part.run_size * part.element_bytes, row_bytes = size * part.element_bytes;
  const int64_t num_whole = run_bytes == kRunBytes ? row_bytes / kRunBytes : 0;
  for (int64_t run = 0; run < num_whole; ++run)
    for (int64_t token = 0; token < count; ++token)
      copy(token * part.token_stride + run * part.run_stride, token * row_stride + run * kRunBytes, kRunBytes);
  for (int64_t begin = num_whole * kRunBytes, run = num_whole; begin < row_bytes; begin += run_bytes, ++run)
    for (int64_t token = 0; token < count; ++token)
      copy(token * part.token_stride + run * part.run_stride, token * row_stride + begin,
           std::min(run_bytes, row_bytes - begin));
}

void copy_piece(std::byte* to, const std::byte* from, int64_t bytes, bool streaming) {
#ifdef __SSE2__
  if (streaming && bytes == kRunBytes) return store_row<true>(to, load_row(from));
#endif
  static_cast<void>(streaming);
  if (bytes == kRunBytes) {
    std::memcpy(to, from, kRunBytes);
  } else {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

// Elements of up to 8 bytes: what is larger (complex128) goes run by run.
bool is_transposed(const KVPart& part) {
  return part.run_size == 1 && part.token_stride == part.element_bytes && part.element_bytes <= 8;
}

}  // namespace

void collect_tokens(const KVPart& part, const std::byte* place, int64_t count, int64_t size, std::byte* out,
                    int64_t out_stride) {
  if (is_transposed(part))
    return transpose_elements<false>(part.element_bytes, out, out_stride, place, part.run_stride, size, count);
  for_each_run(part, count, size, out_stride, [&](int64_t in_cache, int64_t in_row, int64_t bytes) {
    copy_piece(out + in_row, place + in_cache, bytes, false);
  });
}

void scatter_tokens(const KVPart& part, std::byte* place, int64_t count, int64_t size, const std::byte* in,
                    int64_t in_stride, bool streaming) {
  const bool aligned = streaming && is_aligned(place, part.run_stride);
  if (is_transposed(part)) {
    const auto turn = aligned ? &transpose_elements<true> : &transpose_elements<false>;
    return turn(part.element_bytes, place, part.run_stride, in, in_stride, count, size);
  }
  const bool past_cache = aligned && part.token_stride % kRunBytes == 0;
  for_each_run(part, count, size, in_stride, [&](int64_t in_cache, int64_t in_row, int64_t bytes) {
    copy_piece(place + in_cache, in + in_row, bytes, past_cache);
  });
}

}  // namespace kvpage
