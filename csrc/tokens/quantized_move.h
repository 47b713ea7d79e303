// Tokens' rows encoded into a cache of 8-bit numbers, and decoded from it. Called by move_tokens.h alone.
//
//   one run of a head     rows ── codes ──► cache
//   backend "paged"       rows ── codes ──► rows of codes in the processor's cache ── turned around ──► cache
#pragma once

#include "tokens/token_move.h"

namespace kvpage {

// Write and read tokens as move_tokens.h says, for rows of other types than RowType::kBits.
void write_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                     const std::byte* row, bool streaming);
void read_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                    std::byte* row, int64_t next_block_id, bool streaming);

}  // namespace kvpage
