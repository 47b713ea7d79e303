#include "linear/tile_check.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace kvpage {
namespace {

// Full tiles and tails of rows, columns and K; two blocks of K.
constexpr int64_t kRows = 37, kColumns = 60, kSize = 600;
constexpr int64_t kLargeRow = 36, kSubnormalColumn = 59;

float widened(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Numbers of bf16 of either sign, from 2**-4 to 2**4, and some zeros.
class Numbers {
 public:
  uint16_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const auto bits = static_cast<uint32_t>(state_ >> 40);
    const uint32_t exponent = 123 + (bits >> 8) % 8;
    return static_cast<uint16_t>((bits & 0x8000u) | (bits % 61 == 0 ? 0 : exponent << 7 | (bits & 0x7fu)));
  }

 private:
  uint64_t state_ = 2;
};

// x[kRows, kSize] and w[kColumns, kSize]. A row has numbers so large that a column of subnormal ones would count.
struct Trial {
  std::vector<uint16_t> x, w;

  Trial() : x(kRows * kSize), w(kColumns * kSize) {
    Numbers numbers;
    for (uint16_t& number : x) number = numbers.next();
    for (uint16_t& number : w) number = numbers.next();
    for (int64_t k = 0; k < kSize; ++k) {
      uint16_t& large = x[static_cast<size_t>(kLargeRow * kSize + k)];
      if ((large & 0x7fff) != 0) large = static_cast<uint16_t>(large + (90 << 7));
      w[static_cast<size_t>(kSubnormalColumn * kSize + k)] &= 0x807f;
    }
  }
};

struct Free {
  void operator()(float* data) const { ::operator delete(data, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float, Free>;

Floats aligned_floats(int64_t count) {
  const auto bytes = static_cast<size_t>(count) * sizeof(float);
  Floats floats(static_cast<float*>(::operator new(bytes, std::align_val_t(64))));
  std::memset(floats.get(), 0, bytes);
  return floats;
}

// The sums [column][row] of `num_rows` rows from `first` on, as a product leaves them in scratch.
std::vector<uint32_t> sums_of(const LinearKernel& kernel, const Trial& trial, int64_t first, int64_t num_rows) {
  const KBlocks blocks(kSize);
  const Floats staged = aligned_floats(num_rows * blocks.num_blocks * blocks.row_size());
  const Floats sums = aligned_floats(kPanelColumns * kRowBlock), tile = aligned_floats(kTileScratch);
  std::vector<uint16_t> out(static_cast<size_t>(num_rows * kColumns));
  const auto bytes = [](const auto* data) { return reinterpret_cast<const std::byte*>(data); };
  const LinearTask task{RowType::kBfloat16,
                        Activation::kNone,
                        blocks,
                        bytes(staged.get()),
                        num_rows,
                        0,
                        num_rows,
                        bytes(trial.w.data()),
                        nullptr,
                        kSize * 2,
                        0,
                        kColumns,
                        0,
                        kColumns,
                        nullptr,
                        reinterpret_cast<std::byte*>(out.data()),
                        kColumns * 2};
  kernel.stage(task, bytes(trial.x.data() + first * kSize), kSize * 2);
  kernel.multiply(task, {sums.get(), tile.get()});
  std::vector<uint32_t> bits(static_cast<size_t>(num_rows * kColumns));
  for (int64_t column = 0; column < kColumns; ++column)
    std::memcpy(bits.data() + column * num_rows, sums.get() + column * kRowBlock, static_cast<size_t>(num_rows) * 4);
  return bits;
}

// Runs of rows of other lengths and beginnings: each has the bits that it has among all.
bool rows_are_independent(const LinearKernel& tiles, const Trial& trial, const std::vector<uint32_t>& all) {
  constexpr int64_t kRuns[][2] = {{0, 1}, {5, 1}, {35, 2}, {1, 15}, {17, 16}, {3, 17}, {4, 32}, {2, 33}};
  for (const auto& [first, count] : kRuns) {
    const std::vector<uint32_t> some = sums_of(tiles, trial, first, count);
    for (int64_t column = 0; column < kColumns; ++column)
      if (std::memcmp(some.data() + column * count, all.data() + column * kRows + first,
                      static_cast<size_t>(count) * 4) != 0)
        return false;
  }
  return true;
}

// Any order of kSize sums in fp32 is so near to the sum in double.
bool sums_are_near(const Trial& trial, const std::vector<uint32_t>& all) {
  for (int64_t column = 0; column < kSubnormalColumn; ++column)
    for (int64_t row = 0; row < kRows; ++row) {
      double total = 0, magnitude = 0;
      for (int64_t k = 0; k < kSize; ++k) {
        const double product = static_cast<double>(widened(trial.x[static_cast<size_t>(row * kSize + k)])) *
                               widened(trial.w[static_cast<size_t>(column * kSize + k)]);
        total += product, magnitude += std::abs(product);
      }
      const double sum = std::bit_cast<float>(all[static_cast<size_t>(column * kRows + row)]);
      if (!(std::abs(sum - total) <= kSize * 0x1p-24 * magnitude)) return false;
    }
  return true;
}

std::string digest_of(const std::vector<uint32_t>& bits) {  // FNV-1a
  uint32_t digest = 2166136261u;
  for (const uint32_t word : bits)
    for (int shift = 0; shift < 32; shift += 8) digest = (digest ^ (word >> shift & 0xffu)) * 16777619u;
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", digest);
  return text;
}

}  // namespace

TileVerdict check_tiles(const LinearKernel& tiles, const LinearKernel& model) {
  const Trial trial;
  const std::vector<uint32_t> all = sums_of(tiles, trial, 0, kRows);
  if (!rows_are_independent(tiles, trial, all)) return {"", "a row by tiles has other bits in another batch"};
  if (all == sums_of(model, trial, 0, kRows)) return {"amx", ""};
  if (!sums_are_near(trial, all)) return {"", "products by tiles are wrong"};
  return {"amx-" + digest_of(all), ""};
}

}  // namespace kvpage
