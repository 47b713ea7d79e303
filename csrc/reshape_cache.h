// Writing the keys and values of new tokens into the slots of a cache in host memory.
#pragma once

#include <cstdint>

#include "cache_view.h"

namespace kvpage {

struct ReshapeCache {
  RowView key, value;              // [num_tokens, num_heads, size]
  BlockView key_cache, value_cache;  // [num_blocks, block_size, num_heads, head_size]
  int64_t key_bytes, value_bytes;  // of one head of one token; what lies behind them in a cache row stays as it is
  const int64_t* slot_mapping;     // [num_tokens]; block_id * block_size + offset, or -1: written nowhere
  int64_t num_tokens, num_heads, num_blocks, block_size;
  int max_threads;
};

// Throws InvalidArgument for a slot out of range or named twice, before anything is written.
void reshape_and_cache(const ReshapeCache& args);

}  // namespace kvpage
