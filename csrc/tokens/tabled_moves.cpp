#include "tokens/tabled_moves.h"

#include <optional>

#include "quantize/quantize_kernel.h"

namespace kvpage {
namespace {

constexpr int64_t kTabledElements = 16 << 10;  // of a scale: a few times what making its table costs

bool is_worth_tables(const TokenMove& move, int64_t num_heads, int64_t num_tokens) {
  return is_fp8(move.code_type) && num_tokens * num_heads * move.size >= kTabledElements * move.num_scales(num_heads);
}

// Return one table a scale, or none.
std::vector<EncodeTable> encode_tables(const TokenMove& move, int64_t num_heads, int64_t num_tokens) {
  std::vector<EncodeTable> tables;
  const bool has_them = quantize_kernels().best().encode_by_table && move.row_type == RowType::kBfloat16;
  if (!has_them || !is_worth_tables(move, num_heads, num_tokens)) return tables;
  for (int64_t head = 0; head < move.num_scales(num_heads); ++head) {
    const std::optional<EncodeTable> table = make_encode_table(move.code_type, move.head_scale(head));
    if (!table) return {};
    tables.push_back(*table);
  }
  return tables;
}

std::vector<DecodeTable> decode_tables(const TokenMove& move, int64_t num_heads, int64_t num_tokens) {
  std::vector<DecodeTable> tables;
  const bool has_them = quantize_kernels().best().decode_by_table &&
                        (move.row_type == RowType::kBfloat16 || move.row_type == RowType::kFloat16);
  if (!has_them || !is_worth_tables(move, num_heads, num_tokens)) return tables;
  for (int64_t head = 0; head < move.num_scales(num_heads); ++head)
    tables.push_back(make_decode_table(move.code_type, move.row_type, move.head_scale(head)));
  return tables;
}

}  // namespace

TabledMoves TabledMoves::for_writes(const TokenMove* moves, int num_moves, int64_t num_heads, int64_t num_tokens) {
  TabledMoves tabled(moves, num_moves);
  for (TokenMove& move : tabled.moves_) {
    tabled.encode_tables_.push_back(encode_tables(move, num_heads, num_tokens));
    if (!tabled.encode_tables_.back().empty()) move.encode_tables = tabled.encode_tables_.back().data();
  }
  return tabled;
}

TabledMoves TabledMoves::for_reads(const TokenMove* moves, int num_moves, int64_t num_heads, int64_t num_tokens) {
  TabledMoves tabled(moves, num_moves);
  for (TokenMove& move : tabled.moves_) {
    tabled.decode_tables_.push_back(decode_tables(move, num_heads, num_tokens));
    if (!tabled.decode_tables_.back().empty()) move.decode_tables = tabled.decode_tables_.back().data();
  }
  return tabled;
}

}  // namespace kvpage
