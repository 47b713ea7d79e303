// The body of QuantizeKernel, compiled once for each instruction set (simd/kernel.cpp.in): rows by their type.
#pragma once

#include <limits>

#include "quantize/int8_rows_impl.h"
#include "quantize/rows_impl.h"
#include "quantize/table_rows_impl.h"

namespace kvpage {
namespace {

template <typename T>
float encode_typed(CodeType code_type, const T* row, int64_t size, float scale, std::byte* codes) {
  if (code_type == CodeType::kInt8) return encode_int8_row(row, size, codes);
  if (code_type == CodeType::kE4m3) encode_fp8_row<E4m3>(row, size, scale, codes);
  if (code_type == CodeType::kE5m2) encode_fp8_row<E5m2>(row, size, scale, codes);
  return scale;
}

template <typename T>
void decode_typed(CodeType code_type, const std::byte* codes, int64_t size, float scale, T* row, bool streaming) {
  if (code_type == CodeType::kE4m3) return decode_fp8_row<E4m3>(codes, size, scale, row, streaming);
  if (code_type == CodeType::kE5m2) return decode_fp8_row<E5m2>(codes, size, scale, row, streaming);
  const Vec factor = splat(scale);
  decode_row(codes, size, row, streaming, [&](const std::byte* at) { return decode_int8(at) * factor; });
}

float encode(CodeType code_type, RowType type, const std::byte* row, int64_t size, float scale, std::byte* codes,
             bool /*streaming*/) {
  if (code_type == CodeType::kInt8 && type == RowType::kBfloat16) {
    encode_int8_bf16({row, 0, codes, 0, 1, size}, &scale);
    return scale;
  }
  switch (type) {
    case RowType::kBfloat16: return encode_typed(code_type, reinterpret_cast<const Bf16*>(row), size, scale, codes);
    case RowType::kFloat16: return encode_typed(code_type, reinterpret_cast<const Fp16*>(row), size, scale, codes);
    default: return encode_typed(code_type, reinterpret_cast<const float*>(row), size, scale, codes);
  }
}

void decode(CodeType code_type, RowType type, const std::byte* codes, int64_t size, float scale, std::byte* row,
            bool streaming) {
  if (code_type == CodeType::kInt8 && type == RowType::kBfloat16 && scale <= std::numeric_limits<float>::max())
    return decode_int8_bf16(codes, size, scale, row, streaming);
  switch (type) {
    case RowType::kBfloat16:
      return decode_typed(code_type, codes, size, scale, reinterpret_cast<Bf16*>(row), streaming);
    case RowType::kFloat16: return decode_typed(code_type, codes, size, scale, reinterpret_cast<Fp16*>(row), streaming);
    default: return decode_typed(code_type, codes, size, scale, reinterpret_cast<float*>(row), streaming);
  }
}

}  // namespace

const QuantizeKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, encode,          decode,
                                      encode_int8_bf16,       encode_by_table, decode_by_table};

}  // namespace kvpage
