// The body of TransposeKernel, compiled once for each instruction set (simd/kernel.cpp.in): squares in registers.
//
// A square has sides of 16 bytes: 16 elements of one byte, 8 of two, 4 of four, 2 of eight, one of 16. A register holds
// a row of one square in each of its lanes of 16 bytes, and all of its squares are turned at once:
//
//   rows           a0 a1 a2 a3      interleaved: first half with      a0 c0 a1 c1        again        a0 b0 c0 d0
//   in registers   b0 b1 b2 b3      second half of the registers,     a2 c2 a3 c3                     a1 b1 c1 d1
//                  c0 c1 c2 c3      low and high elements             b0 d0 b1 d1                     a2 b2 c2 d2
//                  d0 d1 d2 d3                                        b2 d2 b3 d3                     a3 b3 c3 d3
//
// Squares above each other come out side by side, so that a register of those is stored as one piece; squares side by
// side are loaded as one. As many are above each other as the matrix has, since whole lines are stored best:
//
//   4 above each other     2 by 2            4 side by side
//   loads of 16 bytes      loads of 32       loads of 64
//   stores of 64           stores of 32      stores of 16
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "simd/transpose_kernel.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvpage {
namespace {

// call(an element's bytes, as a constant)
template <typename Call>
auto with_bytes(int64_t element_bytes, const Call& call) {
  switch (element_bytes) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 4: return call(std::integral_constant<int, 4>{});
    case 8: return call(std::integral_constant<int, 8>{});
    default: return call(std::integral_constant<int, 16>{});
  }
}

// Element by element.
template <int kBytes>
void transpose_slowly(const Transposition& matrix) {
  for (int64_t row = 0; row < matrix.num_rows; ++row)
    for (int64_t column = 0; column < matrix.num_columns; ++column)
      std::memcpy(matrix.to + column * matrix.to_stride + row * kBytes,
                  matrix.from + row * matrix.from_stride + column * kBytes, kBytes);
}

#ifdef __SSE2__

// A register of lanes: the part that differs between instruction sets. Where a register is made of several pieces,
// `stride` is the distance of those in memory.
struct OneLane {
  static constexpr int kLanes = 1;
  __m128i value;

  template <int kPieces>
  static OneLane load(const std::byte* from, int64_t) {
    return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))};
  }
  template <int kPieces>
  void store(std::byte* to, int64_t) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
  }
  template <int kBytes>
  static OneLane low(OneLane a, OneLane b) {
    if constexpr (kBytes == 1) return {_mm_unpacklo_epi8(a.value, b.value)};
    if constexpr (kBytes == 2) return {_mm_unpacklo_epi16(a.value, b.value)};
    if constexpr (kBytes == 4) return {_mm_unpacklo_epi32(a.value, b.value)};
    if constexpr (kBytes == 8) return {_mm_unpacklo_epi64(a.value, b.value)};
  }
  template <int kBytes>
  static OneLane high(OneLane a, OneLane b) {
    if constexpr (kBytes == 1) return {_mm_unpackhi_epi8(a.value, b.value)};
    if constexpr (kBytes == 2) return {_mm_unpackhi_epi16(a.value, b.value)};
    if constexpr (kBytes == 4) return {_mm_unpackhi_epi32(a.value, b.value)};
    if constexpr (kBytes == 8) return {_mm_unpackhi_epi64(a.value, b.value)};
  }
};

#if KVPAGE_REGISTER_BYTES >= 32
struct TwoLanes {
  static constexpr int kLanes = 2;
  __m256i value;

  template <int kPieces>
  static TwoLanes load(const std::byte* from, int64_t stride) {
    if constexpr (kPieces == 1) return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
    if constexpr (kPieces == 2)
      return {_mm256_inserti128_si256(_mm256_castsi128_si256(OneLane::load<1>(from, 0).value),
                                      OneLane::load<1>(from + stride, 0).value, 1)};
  }
  template <int kPieces>
  void store(std::byte* to, int64_t stride) const {
    if constexpr (kPieces == 1) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
    if constexpr (kPieces == 2) {
      OneLane{_mm256_castsi256_si128(value)}.store<1>(to, 0);
      OneLane{_mm256_extracti128_si256(value, 1)}.store<1>(to + stride, 0);
    }
  }
  template <int kBytes>
  static TwoLanes low(TwoLanes a, TwoLanes b) {
    if constexpr (kBytes == 1) return {_mm256_unpacklo_epi8(a.value, b.value)};
    if constexpr (kBytes == 2) return {_mm256_unpacklo_epi16(a.value, b.value)};
    if constexpr (kBytes == 4) return {_mm256_unpacklo_epi32(a.value, b.value)};
    if constexpr (kBytes == 8) return {_mm256_unpacklo_epi64(a.value, b.value)};
  }
  template <int kBytes>
  static TwoLanes high(TwoLanes a, TwoLanes b) {
    if constexpr (kBytes == 1) return {_mm256_unpackhi_epi8(a.value, b.value)};
    if constexpr (kBytes == 2) return {_mm256_unpackhi_epi16(a.value, b.value)};
    if constexpr (kBytes == 4) return {_mm256_unpackhi_epi32(a.value, b.value)};
    if constexpr (kBytes == 8) return {_mm256_unpackhi_epi64(a.value, b.value)};
  }
};
#endif

#if KVPAGE_REGISTER_BYTES >= 64
// With masks of all lanes, the same instructions: GCC warns of uninitialized operands in its own unmasked forms.
struct FourLanes {
  static constexpr int kLanes = 4;
  __m512i value;

  template <int kPieces>
  static FourLanes load(const std::byte* from, int64_t stride) {
    if constexpr (kPieces == 1) return {_mm512_loadu_si512(from)};
    if constexpr (kPieces > 1) {
      const __m256i first = TwoLanes::load<kPieces / 2>(from, stride).value;
      const __m256i second = TwoLanes::load<kPieces / 2>(from + kPieces / 2 * stride, stride).value;
      return {_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(first), second, 1)};
    }
  }
  template <int kPieces>
  void store(std::byte* to, int64_t stride) const {
    if constexpr (kPieces == 1) _mm512_storeu_si512(to, value);
    if constexpr (kPieces > 1) {
      TwoLanes{_mm512_maskz_extracti64x4_epi64(0xff, value, 0)}.store<kPieces / 2>(to, stride);
      TwoLanes{_mm512_maskz_extracti64x4_epi64(0xff, value, 1)}.store<kPieces / 2>(to + kPieces / 2 * stride, stride);
    }
  }
  FourLanes with_middle_lanes_exchanged() const {
    return {_mm512_maskz_shuffle_i64x2(0xff, value, value, _MM_SHUFFLE(3, 1, 2, 0))};
  }
  template <int kBytes>
  static FourLanes low(FourLanes a, FourLanes b) {
    if constexpr (kBytes == 1) return {_mm512_unpacklo_epi8(a.value, b.value)};
    if constexpr (kBytes == 2) return {_mm512_unpacklo_epi16(a.value, b.value)};
    if constexpr (kBytes == 4) return {_mm512_maskz_unpacklo_epi32(0xffff, a.value, b.value)};
    if constexpr (kBytes == 8) return {_mm512_maskz_unpacklo_epi64(0xff, a.value, b.value)};
  }
  template <int kBytes>
  static FourLanes high(FourLanes a, FourLanes b) {
    if constexpr (kBytes == 1) return {_mm512_unpackhi_epi8(a.value, b.value)};
    if constexpr (kBytes == 2) return {_mm512_unpackhi_epi16(a.value, b.value)};
    if constexpr (kBytes == 4) return {_mm512_maskz_unpackhi_epi32(0xffff, a.value, b.value)};
    if constexpr (kBytes == 8) return {_mm512_maskz_unpackhi_epi64(0xff, a.value, b.value)};
  }
};
#endif

#if KVPAGE_REGISTER_BYTES == 64
using Register = FourLanes;
#elif KVPAGE_REGISTER_BYTES == 32
using Register = TwoLanes;
#else
using Register = OneLane;
#endif

template <int kBytes>
constexpr int kSide = 16 / kBytes;

// `kAbove` squares above each other, the register's other lanes side by side.
template <int kBytes, typename Reg, int kAbove>
inline void turn_squares(Reg (&rows)[kSide<kBytes>], const std::byte* from, int64_t from_stride) {
  constexpr int kRows = kSide<kBytes>;
  for (int i = 0; i < kRows; ++i) rows[i] = Reg::template load<kAbove>(from + i * from_stride, kRows * from_stride);
  if constexpr (kRows > 1) {
    for (int step = 1; step < kRows; step *= 2) {
      Reg interleaved[kRows];
      for (int i = 0; i < kRows / 2; ++i) {
        interleaved[2 * i] = Reg::template low<kBytes>(rows[i], rows[i + kRows / 2]);
        interleaved[2 * i + 1] = Reg::template high<kBytes>(rows[i], rows[i + kRows / 2]);
      }
      std::copy(interleaved, interleaved + kRows, rows);
    }
  }
}

template <int kBytes, typename Reg, int kAbove>
inline void transpose_squares(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride) {
  constexpr int kRows = kSide<kBytes>, kBeside = Reg::kLanes / kAbove;
  Reg rows[kRows];
  turn_squares<kBytes, Reg, kAbove>(rows, from, from_stride);
  for (int i = 0; i < kRows; ++i) {
    if constexpr (kAbove == 2 && kBeside == 2) rows[i] = rows[i].with_middle_lanes_exchanged();
    rows[i].template store<kBeside>(to + i * to_stride, kRows * to_stride);
  }
}

template <int kBytes, typename Reg, int kAbove>
void transpose_whole(const Transposition& matrix) {
  constexpr int64_t kRows = kSide<kBytes> * kAbove, kColumns = kSide<kBytes> * (Reg::kLanes / kAbove);
  for (int64_t row = 0; row < matrix.num_rows; row += kRows)
    for (int64_t column = 0; column < matrix.num_columns; column += kColumns)
      transpose_squares<kBytes, Reg, kAbove>(matrix.to + column * matrix.to_stride + row * kBytes, matrix.to_stride,
                                             matrix.from + row * matrix.from_stride + column * kBytes,
                                             matrix.from_stride);
}

// A part that does not fill registers goes square by square; one that does not fill a square, element by element.
template <int kBytes, typename Reg, int kAbove>
void transpose_by(const Transposition& matrix) {
  constexpr int64_t kRows = kSide<kBytes> * kAbove, kColumns = kSide<kBytes> * (Reg::kLanes / kAbove);
  const int64_t rows = matrix.num_rows / kRows * kRows, columns = matrix.num_columns / kColumns * kColumns;
  transpose_whole<kBytes, Reg, kAbove>(matrix.part(kBytes, 0, 0, rows, columns));
  const auto rest = [&](int64_t row, int64_t column, int64_t num_rows, int64_t num_columns) {
    if (num_rows == 0 || num_columns == 0) return;
    const Transposition part = matrix.part(kBytes, row, column, num_rows, num_columns);
    if constexpr (Reg::kLanes > 1) transpose_by<kBytes, OneLane, 1>(part);
    if constexpr (Reg::kLanes == 1) transpose_slowly<kBytes>(part);
  };
  rest(0, columns, rows, matrix.num_columns - columns);
  rest(rows, 0, matrix.num_rows - rows, matrix.num_columns);
}

template <int kBytes>
void transpose_typed(const Transposition& matrix) {
  constexpr int kLanes = Register::kLanes;
  if (matrix.num_rows >= kSide<kBytes> * kLanes) return transpose_by<kBytes, Register, kLanes>(matrix);
  if constexpr (kLanes == 4)
    if (matrix.num_rows >= kSide<kBytes> * 2) return transpose_by<kBytes, Register, 2>(matrix);
  transpose_by<kBytes, Register, 1>(matrix);
}

#if KVPAGE_REGISTER_BYTES >= 64
// --- past the processor's cache ------------------------------------------------------------------------------------
//
// Whole lines of 64 bytes come out where four squares lie above each other: a register is a line of one column. Or
// where columns of one square's height lie dense: four registers' lanes, exchanged, are four lines of four columns.
//
//   column 0  16  32  48             0   1   2   3
//          1  17  33  49            16  17  18  19
//          2  18  34  50     ->     32  33  34  35
//          3  19  35  51            48  49  50  51

template <int kFirst, int kSecond>
inline FourLanes two_of_each(FourLanes a, FourLanes b) {
  return {_mm512_maskz_shuffle_i64x2(0xff, a.value, b.value, _MM_SHUFFLE(kSecond, kFirst, kSecond, kFirst))};
}

inline void exchange_lanes(FourLanes* four) {
  const FourLanes low_01 = two_of_each<0, 1>(four[0], four[1]), low_23 = two_of_each<0, 1>(four[2], four[3]);
  const FourLanes high_01 = two_of_each<2, 3>(four[0], four[1]), high_23 = two_of_each<2, 3>(four[2], four[3]);
  four[0] = two_of_each<0, 2>(low_01, low_23);
  four[1] = two_of_each<1, 3>(low_01, low_23);
  four[2] = two_of_each<0, 2>(high_01, high_23);
  four[3] = two_of_each<1, 3>(high_01, high_23);
}

inline void stream_line(std::byte* to, FourLanes line) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line.value);
}

template <int kBytes, int kAbove>
inline void stream_squares(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride) {
  constexpr int kRows = kSide<kBytes>;
  FourLanes rows[kRows];
  turn_squares<kBytes, FourLanes, kAbove>(rows, from, from_stride);
  if constexpr (kAbove == 4) {
    for (int i = 0; i < kRows; ++i) stream_line(to + i * to_stride, rows[i]);
  } else {
    for (int i = 0; i < kRows; i += 4) {
      exchange_lanes(rows + i);
      for (int lane = 0; lane < 4; ++lane) stream_line(to + (lane * kRows + i) * to_stride, rows[i + lane]);
    }
  }
}

template <int kBytes, int kAbove>
bool stream_whole(const Transposition& matrix) {
  constexpr int64_t kRows = kSide<kBytes> * kAbove, kColumns = kSide<kBytes> * (4 / kAbove);
  if (matrix.num_rows % kRows != 0 || matrix.num_columns % kColumns != 0) return false;
  for (int64_t column = 0; column < matrix.num_columns; column += kColumns)
    for (int64_t row = 0; row < matrix.num_rows; row += kRows)
      stream_squares<kBytes, kAbove>(matrix.to + column * matrix.to_stride + row * kBytes, matrix.to_stride,
                                     matrix.from + row * matrix.from_stride + column * kBytes, matrix.from_stride);
  return true;
}

template <int kBytes>
bool stream_typed(const Transposition& matrix) {
  if (reinterpret_cast<uintptr_t>(matrix.to) % 64 != 0) return false;
  if (matrix.to_stride % 64 == 0) return stream_whole<kBytes, 4>(matrix);
  if constexpr (kSide<kBytes> >= 4)
    if (matrix.num_rows == kSide<kBytes> && matrix.to_stride == 16) return stream_whole<kBytes, 1>(matrix);
  return false;
}

bool stream_elements(int64_t element_bytes, const Transposition& matrix) {
  return with_bytes(element_bytes, [&](auto bytes) { return stream_typed<bytes>(matrix); });
}
#endif

#else
template <int kBytes>
void transpose_typed(const Transposition& matrix) {
  transpose_slowly<kBytes>(matrix);
}
#endif

void transpose_elements(int64_t element_bytes, const Transposition& matrix) {
  with_bytes(element_bytes, [&](auto bytes) { transpose_typed<bytes>(matrix); });
}

}  // namespace

#if KVPAGE_REGISTER_BYTES >= 64
const TransposeKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, transpose_elements, stream_elements};
#else
const TransposeKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, transpose_elements, nullptr};
#endif

}  // namespace kvpage
