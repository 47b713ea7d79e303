// reshape_cache: writes the keys and values of new tokens into the slots of a cache in host memory.
#pragma once

#include <cstdint>

#include "tokens/token_move.h"

namespace kvpage {

struct ReshapeCache {
  const TokenMove* parts;          // [num_parts]: K, and V where there is one
  int num_parts;
  const int64_t* slot_mapping;     // [num_tokens]; block_id * block_size + offset, or -1: written nowhere
  int64_t num_tokens, num_heads, num_blocks, block_size;
  int max_threads;
};

// Throws InvalidArgument for a slot out of range or named twice, before anything is written.
void reshape_and_cache(const ReshapeCache& args);

}  // namespace kvpage
