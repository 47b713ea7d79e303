#include "tokens/move_tokens.h"

#include "tokens/quantized_move.h"
#include "tokens/raw_move.h"

namespace kvpage {

void write_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                  const std::byte* row, bool streaming) {
  const auto write = move.row_type == RowType::kBits ? &write_raw : &write_quantized;
  write(move, num_heads, block_id, offset, count, row, streaming);
}

void read_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                 std::byte* row, int64_t next_block_id, bool streaming) {
  const auto read = move.row_type == RowType::kBits ? &read_raw : &read_quantized;
  read(move, num_heads, block_id, offset, count, row, next_block_id, streaming);
}

}  // namespace kvpage
