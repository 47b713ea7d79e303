// Tokens of one block written and read: copied as they are (raw_move.h) or by way of codes (quantized_move.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tokens/token_move.h"

namespace kvpage {

// Moves `count` tokens that follow each other in a block, from `offset` on, and whose rows follow each other from
// `row` on (the first head's address). `streaming`: past the processor's cache, where runs are long; the caller fences.
// `next_block_id`: the block that is read next, and fetched meanwhile; `block_id` where there is none.
void write_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                  const std::byte* row, bool streaming);
void read_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                 std::byte* row, int64_t next_block_id, bool streaming);

}  // namespace kvpage
