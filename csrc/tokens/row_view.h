// How the native operations see tensors: an address and strides in bytes. Nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

// K or V of one layer: [num_blocks, block_size, num_heads, head_size], elements of a head contiguous.
//
//   data + block_id * block_stride + offset * token_stride + head * head_stride
struct BlockView {
  std::byte* data;
  int64_t block_stride, token_stride, head_stride;  // bytes

  std::byte* row(int64_t block_id, int64_t offset) const {
    return data + block_id * block_stride + offset * token_stride;
  }
};

// K, V, queries or outputs of a run of tokens: [num_tokens, num_heads, size], elements of a head contiguous.
struct RowView {
  std::byte* data;
  int64_t token_stride, head_stride;  // bytes

  std::byte* row(int64_t token) const { return data + token * token_stride; }
};

}  // namespace kvpage
