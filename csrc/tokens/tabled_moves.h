// TabledMoves: moves of tokens with the tables that make their codes faster (code_table.h).
#pragma once

#include <vector>

#include "quantize/code_table.h"
#include "tokens/token_move.h"

namespace kvpage {

// Makes tables where the number of tokens is worth it and the code type, the rows' type and the scales have some. Owns
// the tables. `moves` are copied; the memory that they point to stays the caller's.
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
