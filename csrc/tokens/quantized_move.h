// Tokens' rows encoded into a cache of 8-bit numbers, and decoded from it. Whoever moves tokens asks token_move.h.
//
//   one run of a head     rows ── codec ──► cache
//   backend "paged"       rows ── codec ──► rows of codes in the processor's cache ── turned around ──► cache
#pragma once

#include <vector>

#include "quantize/code_table.h"
#include "tokens/token_move.h"

namespace kvpage {

// As write_tokens and read_tokens, for rows of other types than RowType::kBits.
void write_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                     const std::byte* row, bool streaming);
void read_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                    std::byte* row, int64_t next_block_id, bool streaming);

// Moves with the tables of their scales, where so many tokens are worth making them, and the codec, the rows' type and
// the scales have some. Owns the tables; `moves` remain their callers'.
class TabledMoves {
 public:
  static TabledMoves for_writes(const TokenMove* moves, int num_moves, int64_t num_heads, int64_t num_tokens);
  static TabledMoves for_reads(const TokenMove* moves, int num_moves, int64_t num_heads, int64_t num_tokens);

  const TokenMove& operator[](int i) const { return moves_[static_cast<size_t>(i)]; }

 private:
  TabledMoves(const TokenMove* moves, int num_moves) : moves_(moves, moves + num_moves) {}

  std::vector<TokenMove> moves_;
  std::vector<std::vector<EncodeTable>> encode_tables_;
  std::vector<std::vector<DecodeTable>> decode_tables_;
};

}  // namespace kvpage
