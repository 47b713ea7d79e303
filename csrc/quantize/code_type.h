// RowType and CodeType: the kinds of numbers in a row, and in the cache that keeps it. Python passes both as integers.
#pragma once

#include <cstdint>

namespace kvpage {

enum class RowType { kFloat32, kBfloat16, kFloat16, kBits };  // kBits: the cache's own elements
enum class CodeType { kBits, kE4m3, kE5m2, kInt8 };           // kBits: elements as they are, no codes

inline int64_t row_element_bytes(RowType type, int64_t cache_element_bytes) {
  return type == RowType::kBits ? cache_element_bytes : type == RowType::kFloat32 ? 4 : 2;
}

inline bool is_fp8(CodeType type) { return type == CodeType::kE4m3 || type == CodeType::kE5m2; }

}  // namespace kvpage
