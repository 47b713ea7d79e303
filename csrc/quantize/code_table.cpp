#include "quantize/code_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

namespace kvpage {
namespace {

constexpr int kMantissa = 128;  // bf16 magnitudes of one exponent

// The codes of `count` magnitudes from `first` on.
void codes_of(CodeType code_type, float scale, uint16_t first, int64_t count, uint8_t* codes) {
  std::array<uint16_t, kMantissa> magnitudes;
  std::iota(magnitudes.begin(), magnitudes.begin() + count, first);
  quantize_kernels().best().encode(code_type, RowType::kBfloat16, reinterpret_cast<const std::byte*>(magnitudes.data()),
                                   count, scale, reinterpret_cast<std::byte*>(codes), false);
}

// Returns the offset of a cell with these codes: the first code, and one more from the step on.
uint16_t cell_offset(const uint8_t* codes, int size, uint16_t first, int shift) {
  int step = 1;
  while (step < size && codes[step] == codes[0]) ++step;
  return static_cast<uint16_t>((codes[0] << shift) + (1 << shift) - step - first);
}

}  // namespace

std::optional<EncodeTable> make_encode_table(CodeType code_type, float scale) {
  if (!(scale >= 0x1p-100f && scale <= 0x1p100f)) return std::nullopt;
  const bool e4m3 = code_type == CodeType::kE4m3;
  const int shift = e4m3 ? 4 : 5, least_normal = e4m3 ? -6 : -14, smallest = e4m3 ? -9 : -16;
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  const uint16_t one = static_cast<uint16_t>(bits >> 23 << 7);  // the scale's own power of two
  EncodeTable table{};
  table.shift = static_cast<uint16_t>(shift);
  table.least = static_cast<uint16_t>(one + (smallest - 1) * kMantissa);  // half a step at most: rounds to zero
  // Rounded up: the first magnitude that is not below the scale times the least normal number.
  table.split = static_cast<uint16_t>(((bits + 0xffff) >> 16) + static_cast<uint32_t>(least_normal * kMantissa));
  std::array<uint8_t, kMantissa> codes;
  constexpr int kFine = kMantissa / EncodeTable::kNormalCells, kCoarse = 2 * kFine;
  codes_of(code_type, scale, one, kMantissa, codes.data());
  for (int cell = 0; cell < 2 * EncodeTable::kNormalCells; ++cell) {
    const int first = cell * kFine % kMantissa;
    table.normal[cell] = cell_offset(&codes[first], kFine, static_cast<uint16_t>(one + first), shift);
  }
  table.normal_base = *std::min_element(table.normal, table.normal + EncodeTable::kNormalCells);
  for (int cell = 0; cell < EncodeTable::kNormalCells; ++cell)
    table.normal_bytes[cell] = static_cast<uint8_t>(table.normal[cell] - table.normal_base);
  for (uint16_t first = table.least; first < table.split; first += kCoarse) {
    codes_of(code_type, scale, first, kCoarse, codes.data());
    const uint16_t offset = cell_offset(codes.data(), kCoarse, first, shift);
    table.subnormal[first / kCoarse % EncodeTable::kSubnormalCells] = offset;
    table.subnormal_bytes[(first - table.least) / kCoarse] = static_cast<uint8_t>(offset + first);
  }
  const float largest = (e4m3 ? 448.0f : 57344.0f) * scale;  // what is not below it has the largest code
  table.most = static_cast<uint16_t>((std::bit_cast<uint32_t>(largest) + 0xffff) >> 16);
  return table;
}

DecodeTable make_decode_table(CodeType code_type, RowType type, float scale) {
  std::array<uint8_t, 128> codes;
  std::iota(codes.begin(), codes.end(), 0);
  DecodeTable table;
  quantize_kernels().best().decode(code_type, type, reinterpret_cast<const std::byte*>(codes.data()), codes.size(),
                                   scale, reinterpret_cast<std::byte*>(table.numbers), false);
  for (int i = 0; i < 128; ++i) {
    table.halves[i / 16][0][i % 16] = static_cast<uint8_t>(table.numbers[i]);
    table.halves[i / 16][1][i % 16] = static_cast<uint8_t>(table.numbers[i] >> 8);
  }
  return table;
}

}  // namespace kvpage
