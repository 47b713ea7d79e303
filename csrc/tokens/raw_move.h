// Tokens' rows copied as they are, in as few pieces as their layouts allow. Whoever moves tokens asks token_move.h.
#pragma once

#include "tokens/token_move.h"

namespace kvpage {

// As write_tokens and read_tokens, for rows of RowType::kBits.
void write_raw(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
               const std::byte* row, bool streaming);
void read_raw(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
              std::byte* row, int64_t next_block_id, bool streaming);

}  // namespace kvpage
