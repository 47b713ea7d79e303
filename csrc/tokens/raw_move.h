// Tokens' rows copied as they are, in as few runs as their layouts allow. Called by move_tokens.h alone.
#pragma once

#include "tokens/token_move.h"

namespace kvpage {

// Write and read tokens as move_tokens.h says, for rows of RowType::kBits.
void write_raw(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
               const std::byte* row, bool streaming);
void read_raw(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count, std::byte* row,
              int64_t next_block_id, bool streaming);

}  // namespace kvpage
