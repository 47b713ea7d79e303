#include "token_move.h"

#include <algorithm>
#include <vector>

#include "host_copy.h"

namespace kvpage {
namespace {

constexpr int64_t kCodesAtOnce = 16 << 10;  // bytes that a thread turns around in its first-level cache

bool is_one_run(const KVPart& part, int64_t size) { return part.run_size >= size; }

float head_scale(const TokenMove& move, int64_t head) {
  return move.head_scales ? move.head_scales[head * move.head_scale_stride] : 1.0f;
}

// Runs of bytes of one token's heads or of one head's tokens: as few copies as lie dense on both ends, in the order in
// which what is read lies in memory.
//   copy(cache offset, row offset, bytes), both from the first token's first head
template <typename Copy>
void for_each_dense(const TokenMove& move, int64_t num_heads, int64_t count, bool reads_rows, const Copy& copy) {
  const KVPart& cache = move.cache;
  const int64_t bytes = move.row_bytes(), token_bytes = bytes * num_heads;
  const bool dense_heads = num_heads == 1 || (cache.head_stride == bytes && move.rows.head_stride == bytes);
  if (dense_heads && (count == 1 || (cache.token_stride == token_bytes && move.rows.token_stride == token_bytes)))
    return copy(0, 0, token_bytes * count);
  if (dense_heads) {
    for (int64_t token = 0; token < count; ++token)
      copy(token * cache.token_stride, token * move.rows.token_stride, token_bytes);
    return;
  }
  if (cache.token_stride == bytes && move.rows.token_stride == bytes) {
    for (int64_t head = 0; head < num_heads; ++head)
      copy(head * cache.head_stride, head * move.rows.head_stride, bytes * count);
    return;
  }
  const auto copy_one = [&](int64_t token, int64_t head) {
    copy(token * cache.token_stride + head * cache.head_stride,
         token * move.rows.token_stride + head * move.rows.head_stride, bytes);
  };
  const bool by_token = reads_rows ? move.rows.head_stride < move.rows.token_stride : cache.head_stride < cache.token_stride;
  if (by_token) {
    for (int64_t token = 0; token < count; ++token)
      for (int64_t head = 0; head < num_heads; ++head) copy_one(token, head);
  } else {
    for (int64_t head = 0; head < num_heads; ++head)
      for (int64_t token = 0; token < count; ++token) copy_one(token, head);
  }
}

// Heads that lie side by side on both ends and share one scale are one head, many times as long.
TokenMove with_merged_heads(TokenMove move, int64_t& num_heads) {
  const bool shares_scale = move.codec != Codec::kInt8 && (!move.head_scales || move.head_scale_stride == 0);
  const bool dense = move.cache.head_stride == move.size * move.cache.element_bytes &&
                     move.rows.head_stride == move.row_bytes() && is_one_run(move.cache, move.size);
  if (!shares_scale || !dense) return move;
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

// The codes of one head of `count` tokens, in rows of `stride` bytes.
void encode_tokens(const TokenMove& move, int64_t head, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* rows, std::byte* codes, int64_t stride) {
  const RowCodec& codec = row_codec();
  for (int64_t token = 0; token < count; ++token) {
    const float scale = codec.encode(move.codec, move.row_type, rows + token * move.rows.token_stride, move.size,
                                     head_scale(move, head), codes + token * stride);
    if (move.codec == Codec::kInt8) *move.cache.scale_at(block_id, offset + token, head) = scale;
  }
}

void decode_tokens(const TokenMove& move, int64_t head, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* codes, int64_t stride, std::byte* rows) {
  const RowCodec& codec = row_codec();
  for (int64_t token = 0; token < count; ++token) {
    const float scale = move.codec == Codec::kInt8 ? *move.cache.scale_at(block_id, offset + token, head)
                                                   : head_scale(move, head);
    codec.decode(move.codec, move.row_type, codes + token * stride, move.size, scale,
                 rows + token * move.rows.token_stride);
  }
}

// body(head, first token, number of tokens, codes) for pieces whose codes fit into the scratch.
template <typename Body>
void for_each_piece(const TokenMove& move, int64_t num_heads, int64_t count, const Body& body) {
  thread_local std::vector<std::byte> scratch;
  const int64_t at_once = std::clamp<int64_t>(kCodesAtOnce / move.size, 1, count);
  if (static_cast<int64_t>(scratch.size()) < at_once * move.size) scratch.resize(static_cast<size_t>(at_once * move.size));
  for (int64_t head = 0; head < num_heads; ++head)
    for (int64_t first = 0; first < count; first += at_once)
      body(head, first, std::min(at_once, count - first), scratch.data());
}

}  // namespace

void write_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                  const std::byte* row, bool streaming) {
  const KVPart& cache = move.cache;
  const bool one_run = is_one_run(cache, move.size);
  if (move.row_type == RowType::kBits && one_run) {
    std::byte* place = cache.at(block_id, offset, 0);
    return for_each_dense(move, num_heads, count, true, [&](int64_t in_cache, int64_t in_rows, int64_t bytes) {
      copy_bytes(place + in_cache, row + in_rows, bytes, streaming);
    });
  }
  if (move.row_type == RowType::kBits) {
    for (int64_t head = 0; head < num_heads; ++head)
      scatter_tokens(cache, cache.at(block_id, offset, head), count, move.size, row + head * move.rows.head_stride,
                     move.rows.token_stride, streaming);
    return;
  }
  if (one_run) {
    const TokenMove merged = with_merged_heads(move, num_heads);
    return for_each_head(merged, num_heads, count, [&](int64_t head, int64_t first, int64_t num) {
      encode_tokens(merged, head, block_id, offset + first, num,
                    row + head * move.rows.head_stride + first * move.rows.token_stride,
                    cache.at(block_id, offset + first, head), cache.token_stride);
    });
  }
  for_each_piece(move, num_heads, count, [&](int64_t head, int64_t first, int64_t num, std::byte* codes) {
    encode_tokens(move, head, block_id, offset + first, num,
                  row + head * move.rows.head_stride + first * move.rows.token_stride, codes, move.size);
    scatter_tokens(cache, cache.at(block_id, offset + first, head), num, move.size, codes, move.size, false);
  });
}

void read_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                 std::byte* row, bool streaming) {
  const KVPart& cache = move.cache;
  const bool one_run = is_one_run(cache, move.size);
  if (move.row_type == RowType::kBits && one_run) {
    const std::byte* place = cache.at(block_id, offset, 0);
    return for_each_dense(move, num_heads, count, false, [&](int64_t in_cache, int64_t in_rows, int64_t bytes) {
      copy_bytes(row + in_rows, place + in_cache, bytes, streaming);
    });
  }
  if (move.row_type == RowType::kBits) {
    for (int64_t head = 0; head < num_heads; ++head)
      collect_tokens(cache, cache.at(block_id, offset, head), count, move.size, row + head * move.rows.head_stride,
                     move.rows.token_stride);
    return;
  }
  if (one_run) {
    const TokenMove merged = with_merged_heads(move, num_heads);
    return for_each_head(merged, num_heads, count, [&](int64_t head, int64_t first, int64_t num) {
      decode_tokens(merged, head, block_id, offset + first, num, cache.at(block_id, offset + first, head),
                    cache.token_stride, row + head * move.rows.head_stride + first * move.rows.token_stride);
    });
  }
  for_each_piece(move, num_heads, count, [&](int64_t head, int64_t first, int64_t num, std::byte* codes) {
    collect_tokens(cache, cache.at(block_id, offset + first, head), num, move.size, codes, move.size);
    decode_tokens(move, head, block_id, offset + first, num, codes, move.size,
                  row + head * move.rows.head_stride + first * move.rows.token_stride);
  });
}

}  // namespace kvpage
