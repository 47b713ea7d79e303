// ModelTiles: tile registers in plain C++, for tests on any machine, and for the check of a processor's own. Bit by bit
// what tile_shapes.h says; NaNs may have other bits.
#pragma once

#include <cmath>
#include <cstring>

#include "linear/tiles/tile_shapes.h"
#include "simd/pairs.h"

namespace kvpage {
namespace {

#if KVPAGE_LANES == 16

// sum + a * b, rounded once, lane by lane.
inline Vec fused(Vec sum, Vec a, Vec b) {
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] = std::fma(a[lane], b[lane], sum[lane]);
  return flushed(sum);
}

// Such numbers are zeros or lie in 2**-50 ... 2**51. Their products are exact in fp32, and multiples of 2**-114: no sum
// of them is subnormal. So two roundings are one, and nothing is to be flushed.
inline bool is_tame(uint32_t bf16) {
  const uint32_t exponent = bf16 >> 7 & 0xffu;
  return exponent == 0 || (exponent >= 77 && exponent <= 177);
}

class ModelTiles {
 public:
  void configure(const TileShapes& shapes) {
    shapes_ = shapes;
    std::memset(rows_, 0, sizeof(rows_));
  }

  template <int kTile>
  void zero() {
    std::memset(rows_[kTile], 0, kTileBytes);
  }

  template <int kTile>
  void load(const void* from, int64_t stride) {
    zero<kTile>();
    for (int row = 0; row < shapes_.num_rows[kTile]; ++row)
      std::memcpy(rows_[kTile][row], static_cast<const std::byte*>(from) + row * stride, shapes_.row_bytes[kTile]);
  }

  template <int kTile>
  void store(void* to, int64_t stride) {
    for (int row = 0; row < shapes_.num_rows[kTile]; ++row)
      std::memcpy(static_cast<std::byte*>(to) + row * stride, rows_[kTile][row], shapes_.row_bytes[kTile]);
  }

  template <int kSums, int kLeft, int kRight>
  void multiply_add() {
    const int depth = shapes_.num_rows[kRight];
    Vec low[kTileSide], high[kTileSide];
    for (int k = 0; k < depth; ++k) low[k] = low_of(words(kRight, k)), high[k] = high_of(words(kRight, k));
    const bool all_tame = are_tame(kLeft) && are_tame(kRight);
    for (int n = 0; n < shapes_.num_rows[kSums]; ++n) {
      Vec even = {}, odd = {};
      for (int k = 0; k < depth; ++k) {
        const WordVec pair = rows_[kLeft][n][k] - WordVec{};
        even = all_tame ? even + low_of(pair) * low[k] : fused(even, low_of(pair), low[k]);
        odd = all_tame ? odd + high_of(pair) * high[k] : fused(odd, high_of(pair), high[k]);
      }
      const Vec before = flushed(bit_cast<Vec>(words(kSums, n)));
      const Vec after = flushed(before + flushed(even + odd));
      std::memcpy(rows_[kSums][n], &after, shapes_.row_bytes[kSums]);
    }
  }

 private:
  static Vec low_of(WordVec pairs) { return flushed(bit_cast<Vec>(pairs << 16)); }
  static Vec high_of(WordVec pairs) { return flushed(bit_cast<Vec>(pairs & 0xffff0000u)); }
  WordVec words(int tile, int row) const {
    WordVec words;
    std::memcpy(&words, rows_[tile][row], sizeof(words));
    return words;
  }
  bool are_tame(int tile) const {
    for (const auto& row : rows_[tile])
      for (const uint32_t pair : row)
        if (!is_tame(pair & 0xffffu) || !is_tame(pair >> 16)) return false;
    return true;
  }

  TileShapes shapes_;
  uint32_t rows_[8][kTileSide][kTileSide];
};

#endif

}  // namespace
}  // namespace kvpage
