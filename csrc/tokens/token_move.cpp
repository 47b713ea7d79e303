#include "tokens/token_move.h"

#include <limits>

#include "base/check.h"

namespace kvpage {
namespace {

constexpr int64_t kMostElementBytes = 16;  // of complex128

void check_kinds(const TokenMove& move) {
  const auto row_type = static_cast<int>(move.row_type), code_type = static_cast<int>(move.code_type);
  check(row_type >= 0 && row_type <= static_cast<int>(RowType::kBits), "row_type must be in [0, 3], got ", row_type);
  check(code_type >= 0 && code_type <= static_cast<int>(CodeType::kInt8), "code_type must be in [0, 3], got ",
        code_type);
  check((move.row_type == RowType::kBits) == (move.code_type == CodeType::kBits),
        "row_type and code_type must both be bits or both be numbers, got ", row_type, " and ", code_type);
  if (move.code_type == CodeType::kBits) return;
  check(move.cache.element_bytes == 1, "element_bytes must be 1 for codes, got ", move.cache.element_bytes);
  check(move.code_type != CodeType::kInt8 || move.cache.scales, "int8 must have scales in its blocks, got none");
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

}  // namespace kvpage
