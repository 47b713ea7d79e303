#include "linear/fast_types.h"

#include "simd/instruction_sets.h"

namespace kvpage {

bool has_fast_linear(RowType type) {
  if (!has_instruction_set("avx2")) return false;
  switch (type) {
    case RowType::kFloat32: return true;
    case RowType::kBfloat16: return !has_instruction_set("amx_bf16");
    case RowType::kFloat16: return !has_instruction_set("avx512_fp16");
    default: return false;
  }
}

}  // namespace kvpage
