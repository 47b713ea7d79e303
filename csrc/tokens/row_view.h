// RowView: rows of tokens, as an address and strides. Owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

// K, V, queries or outputs of a run of tokens: [num_tokens, num_heads, size], elements of a head contiguous.
struct RowView {
  std::byte* data;
  int64_t token_stride, head_stride;  // bytes

  std::byte* row(int64_t token) const { return data + token * token_stride; }
};

}  // namespace kvpage
