// EncodeTable and DecodeTable: an 8-bit float and a scale, tabulated for numbers of 16 bits. They fit a few registers,
// and equal QuantizeKernel exactly: they are filled from it.
//
// DecodeTable: a code has a sign and 7 more bits; the table has a number for each value of those 7 bits.
//
// EncodeTable: of bf16. A magnitude's bits are  eeeeeeee mmmmmmm,  and `shift` of the mantissa's are more than the code
// has. Codes rise with magnitudes, so that the table has to know where they step. A cell of magnitudes that differ in
// their last bits alone has at most one step, and one number for a cell says code and step:
//
//     code = (magnitude + offset of its cell) >> shift
//
//     magnitude     least ............... split ............................. most
//     code          0    subnormal codes        normal ones, alike for each exponent        largest
//     cells              8 an exponent, 64      16 an exponent, for one
//
// A cell of 1/8 (1/16) of a power of two, divided by the scale, is at most as wide as the distance of two subnormal
// (normal) codes, whatever the scale, and from the first of its magnitudes to the last it is less: one step or none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "quantize/quantize_kernel.h"

namespace kvpage {

struct EncodeTable {
  static constexpr int kNormalCells = 16, kSubnormalCells = 64;  // by the bits above the last 3, above the last 4

  alignas(64) uint16_t normal[2 * kNormalCells];  // twice, for registers of 32
  uint16_t subnormal[kSubnormalCells];
  uint16_t least, split, most;  // magnitudes below or above `least` and `most` have the codes of these
  uint16_t shift;
  // For lookups of bytes: the normal cells' offsets above normal_base, and the subnormal cells' from the first
  // on, to which the magnitudes' last 4 bits are added alone.
  uint16_t normal_base;
  alignas(16) uint8_t normal_bytes[kNormalCells];
  uint8_t subnormal_bytes[48];
};

struct DecodeTable {
  alignas(64) uint16_t numbers[128];
  uint8_t halves[8][2][16];  // the low bytes of 16 of them, and the high ones
};

// Nothing for scales so far from one that quotients leave fp32's normal numbers. `code_type` is that of an 8-bit float.
std::optional<EncodeTable> make_encode_table(CodeType code_type, float scale);

// For rows of bf16 or fp16.
DecodeTable make_decode_table(CodeType code_type, RowType type, float scale);

}  // namespace kvpage
