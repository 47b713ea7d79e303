#include "quantized_move.h"

#include <algorithm>

#include "raw_move.h"

namespace kvpage {
namespace {

constexpr int64_t kCodesAtOnce = 16 << 10;   // bytes that a thread turns around in its first-level cache
constexpr int64_t kStreamedAtOnce = 32 << 10;  // bytes of a piece that is streamed
constexpr int64_t kTabledElements = 16 << 10;  // a scale: making its table takes as long as encoding a fourth of them

float head_scale(const TokenMove& move, int64_t head) {
  return move.head_scales ? move.head_scales[head * move.head_scale_stride] : 1.0f;
}

int64_t num_scales(const TokenMove& move, int64_t num_heads) {
  return move.head_scales && move.head_scale_stride != 0 ? num_heads : 1;
}

bool is_fp8(Codec codec) { return codec == Codec::kE4m3 || codec == Codec::kE5m2; }

std::byte* scratch(int64_t bytes) {
  thread_local std::vector<std::byte> buffer;
  if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(static_cast<size_t>(bytes));
  return buffer.data();
}

// Heads that lie side by side on both ends and share one scale are one head, many times as long.
TokenMove with_merged_heads(TokenMove move, int64_t& num_heads) {
  const bool shares_scale = is_fp8(move.codec) && num_scales(move, num_heads) == 1;
  const bool dense = move.cache.head_stride == move.size && move.rows.head_stride == move.row_bytes();
  if (!shares_scale || !dense || !is_one_run(move)) return move;
  move.size *= num_heads;
  move.cache.run_size = move.size;
  num_heads = 1;
  return move;
}

// body(head, first token, number of tokens), in the order in which the cache lies in memory.
template <typename Body>
void for_each_head(const TokenMove& move, int64_t num_heads, int64_t count, const Body& body) {
  if (num_heads > 1 && move.cache.head_stride < move.cache.token_stride) {
    for (int64_t token = 0; token < count; ++token)
      for (int64_t head = 0; head < num_heads; ++head) body(head, token, 1);
  } else {
    for (int64_t head = 0; head < num_heads; ++head) body(head, 0, count);
  }
}

// One head of `count` tokens: rows to codes in rows of `stride` bytes.
void encode_tokens(const TokenMove& move, int64_t head, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* rows, std::byte* codes, int64_t stride) {
  const RowCodec& codec = row_codec();
  const EncodeTable* table = move.encode_tables ? move.encode_tables + head * move.head_scale_stride : nullptr;
  for (int64_t token = 0; token < count; ++token, rows += move.rows.token_stride, codes += stride) {
    if (table) {
      codec.encode_by_table(*table, rows, move.size, codes);
      continue;
    }
    const float scale = codec.encode(move.codec, move.row_type, rows, move.size, head_scale(move, head), codes);
    if (move.codec == Codec::kInt8) *move.cache.scale_at(block_id, offset + token, head) = scale;
  }
}

void decode_tokens(const TokenMove& move, int64_t head, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* codes, int64_t stride, std::byte* rows) {
  const RowCodec& codec = row_codec();
  const DecodeTable* table = move.decode_tables ? move.decode_tables + head * move.head_scale_stride : nullptr;
  for (int64_t token = 0; token < count; ++token, codes += stride, rows += move.rows.token_stride) {
    if (table) {
      codec.decode_by_table(*table, codes, move.size, rows);
      continue;
    }
    const float scale = move.codec == Codec::kInt8 ? *move.cache.scale_at(block_id, offset + token, head)
                                                   : head_scale(move, head);
    codec.decode(move.codec, move.row_type, codes, move.size, scale, rows);
  }
}

// body(head, first token, number of tokens, codes) for pieces whose codes fit into the scratch.
template <typename Body>
void for_each_piece(const TokenMove& move, int64_t num_heads, int64_t count, const Body& body) {
  const int64_t at_once = std::clamp<int64_t>(kCodesAtOnce / move.size, 1, count);
  std::byte* codes = scratch(at_once * move.size);
  for (int64_t head = 0; head < num_heads; ++head)
    for (int64_t first = 0; first < count; first += at_once)
      body(head, first, std::min(at_once, count - first), codes);
}

void write_one_run(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* row) {
  const TokenMove merged = with_merged_heads(move, num_heads);
  for_each_head(merged, num_heads, count, [&](int64_t head, int64_t first, int64_t num) {
    encode_tokens(merged, head, block_id, offset + first, num,
                  row + head * move.rows.head_stride + first * move.rows.token_stride,
                  move.cache.at(block_id, offset + first, head), move.cache.token_stride);
  });
}

void read_one_run(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                  std::byte* row) {
  const TokenMove merged = with_merged_heads(move, num_heads);
  for_each_head(merged, num_heads, count, [&](int64_t head, int64_t first, int64_t num) {
    decode_tokens(merged, head, block_id, offset + first, num, move.cache.at(block_id, offset + first, head),
                  move.cache.token_stride, row + head * move.rows.head_stride + first * move.rows.token_stride);
  });
}

// Bytes of a head's codes and, where it has one, the scale right behind them; 0 if the scale lies elsewhere.
int64_t stored_bytes(const TokenMove& move) {
  if (move.codec != Codec::kInt8) return move.size;
  const KVPart& cache = move.cache;
  const bool behind = cache.scales == cache.data + move.size && cache.scale_block_stride == cache.block_stride &&
                      cache.scale_token_stride == cache.token_stride && cache.scale_head_stride == cache.head_stride;
  return behind ? move.size + static_cast<int64_t>(sizeof(float)) : 0;
}

// Calls body(first token, number of tokens) for as many at once as fit into a piece.
template <typename Body>
void for_each_streamed(int64_t token_bytes, int64_t count, const Body& body) {
  const int64_t at_once = std::clamp<int64_t>(kStreamedAtOnce / token_bytes, 1, count);
  for (int64_t first = 0; first < count; first += at_once) body(first, std::min(at_once, count - first));
}

void write_streaming(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                     const std::byte* row, int64_t bytes) {
  const KVPart& cache = move.cache;
  const bool by_token = cache.head_stride < cache.token_stride;
  for_each_streamed(num_heads * bytes, count, [&](int64_t first, int64_t num) {
    TokenMove encoded = move;
    encoded.cache.data = scratch(num_heads * bytes * num);
    encoded.cache.token_stride = by_token ? num_heads * bytes : bytes;
    encoded.cache.head_stride = by_token ? bytes : num * bytes;
    encoded.cache.scales = encoded.cache.data + move.size;
    encoded.cache.scale_token_stride = encoded.cache.token_stride;
    encoded.cache.scale_head_stride = encoded.cache.head_stride;
    write_one_run(encoded, num_heads, 0, 0, num, row + first * move.rows.token_stride);
    TokenMove copied = move;
    copied.row_type = RowType::kBits;
    copied.size = copied.cache.run_size = bytes;
    copied.rows = {encoded.cache.data, encoded.cache.token_stride, encoded.cache.head_stride};
    write_raw(copied, num_heads, block_id, offset + first, num, encoded.cache.data, true);
  });
}

void read_streaming(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                    std::byte* row) {
  const int64_t bytes = move.row_bytes();
  const bool by_token = move.rows.head_stride < move.rows.token_stride;
  for_each_streamed(num_heads * bytes, count, [&](int64_t first, int64_t num) {
    TokenMove decoded = move;
    decoded.rows.data = scratch(num_heads * bytes * num);
    decoded.rows.token_stride = by_token ? num_heads * bytes : bytes;
    decoded.rows.head_stride = by_token ? bytes : num * bytes;
    read_one_run(decoded, num_heads, block_id, offset + first, num, decoded.rows.data);
    TokenMove copied = move;
    copied.row_type = RowType::kBits;
    copied.cache = {decoded.rows.data, 0, decoded.rows.token_stride, decoded.rows.head_stride, 0, bytes, 1, nullptr, 0, 0, 0};
    copied.size = bytes;
    read_raw(copied, num_heads, 0, 0, num, row + first * move.rows.token_stride, true);
  });
}

bool is_worth_tables(const TokenMove& move, int64_t num_heads, int64_t num_tokens) {
  return is_fp8(move.codec) && num_tokens * num_heads * move.size >= kTabledElements * num_scales(move, num_heads);
}

// One a scale, or none.
std::vector<EncodeTable> encode_tables(const TokenMove& move, int64_t num_heads, int64_t num_tokens) {
  std::vector<EncodeTable> tables;
  const bool has_them = row_codec().encode_by_table && move.row_type == RowType::kBfloat16;
  if (!has_them || !is_worth_tables(move, num_heads, num_tokens)) return tables;
  for (int64_t head = 0; head < num_scales(move, num_heads); ++head) {
    const std::optional<EncodeTable> table = make_encode_table(move.codec, head_scale(move, head));
    if (!table) return {};
    tables.push_back(*table);
  }
  return tables;
}

std::vector<DecodeTable> decode_tables(const TokenMove& move, int64_t num_heads, int64_t num_tokens) {
  std::vector<DecodeTable> tables;
  const bool has_them = row_codec().decode_by_table && (move.row_type == RowType::kBfloat16 || move.row_type == RowType::kFloat16);
  if (!has_them || !is_worth_tables(move, num_heads, num_tokens)) return tables;
  for (int64_t head = 0; head < num_scales(move, num_heads); ++head)
    tables.push_back(make_decode_table(move.codec, move.row_type, head_scale(move, head)));
  return tables;
}

}  // namespace

void write_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                     const std::byte* row, bool streaming) {
  const int64_t bytes = stored_bytes(move);
  if (is_one_run(move) && streaming && bytes > 0)
    return write_streaming(move, num_heads, block_id, offset, count, row, bytes);
  if (is_one_run(move)) return write_one_run(move, num_heads, block_id, offset, count, row);
  for_each_piece(move, num_heads, count, [&](int64_t head, int64_t first, int64_t num, std::byte* codes) {
    encode_tokens(move, head, block_id, offset + first, num,
                  row + head * move.rows.head_stride + first * move.rows.token_stride, codes, move.size);
    scatter_tokens(move.cache, move.cache.at(block_id, offset + first, head), num, move.size, codes, move.size, false);
  });
}

void read_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                    std::byte* row, bool streaming) {
  if (is_one_run(move) && streaming) return read_streaming(move, num_heads, block_id, offset, count, row);
  if (is_one_run(move)) return read_one_run(move, num_heads, block_id, offset, count, row);
  for_each_piece(move, num_heads, count, [&](int64_t head, int64_t first, int64_t num, std::byte* codes) {
    collect_tokens(move.cache, move.cache.at(block_id, offset + first, head), num, move.size, codes, move.size);
    decode_tokens(move, head, block_id, offset + first, num, codes, move.size,
                  row + head * move.rows.head_stride + first * move.rows.token_stride);
  });
}

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
