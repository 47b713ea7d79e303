#include "tokens/token_move.h"

#include <limits>

#include "base/check.h"
#include "tokens/quantized_move.h"
#include "tokens/raw_move.h"

namespace kvpage {
namespace {

constexpr int64_t kMostElementBytes = 16;  // of complex128

void check_kinds(const TokenMove& move) {
  const auto row_type = static_cast<int>(move.row_type), codec = static_cast<int>(move.codec);
  check(row_type >= 0 && row_type <= static_cast<int>(RowType::kBits), "row_type must be a RowType, got ", row_type);
  check(codec >= 0 && codec <= static_cast<int>(Codec::kInt8), "codec must be a Codec, got ", codec);
  check((move.row_type == RowType::kBits) == (move.codec == Codec::kBits),
        "rows must be copied as they are exactly where there is no codec, got row_type ", row_type, " and codec ", codec);
  if (move.codec == Codec::kBits) return;
  check(move.cache.element_bytes == 1, "a codec's elements must be of 1 byte, got ", move.cache.element_bytes);
  check(move.codec != Codec::kInt8 || move.cache.scales, "int8 must have scales in its blocks, got none");
}

}  // namespace

void check_moves(std::span<const TokenMove> moves, int64_t num_heads, int64_t num_tokens) {
  check(num_tokens >= 0, "num_tokens must not be negative, got ", num_tokens);
  check(num_heads > 0, "num_heads must be positive, got ", num_heads);
  for (const TokenMove& move : moves) {
    const int64_t bytes = move.cache.element_bytes;
    check(bytes > 0 && bytes <= kMostElementBytes && (bytes & (bytes - 1)) == 0,
          "element_bytes must be a power of two of at most ", kMostElementBytes, ", got ", bytes);
    check(move.size > 0, "size must be positive, got ", move.size);
    check(move.cache.run_size > 0, "run_size must be positive, got ", move.cache.run_size);
    check_kinds(move);
  }
}

void check_blocks_of_cache(int64_t num_blocks, int64_t block_size) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check(num_blocks >= 0 && num_blocks <= kMost, "num_blocks must be in [0, ", kMost, "], got ", num_blocks);
  check(block_size > 0 && block_size <= kMost, "block_size must be in [1, ", kMost, "], got ", block_size);
}

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
