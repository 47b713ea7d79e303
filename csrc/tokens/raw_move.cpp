#include "tokens/raw_move.h"

#include "base/copy_bytes.h"

namespace kvpage {
namespace {

// Runs of bytes of one token's heads or of one head's tokens: as few copies as are dense on both sides, in the order of
// the memory that is read.
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
  const bool by_token =
      reads_rows ? move.rows.head_stride < move.rows.token_stride : cache.head_stride < cache.token_stride;
  if (by_token) {
    for (int64_t token = 0; token < count; ++token)
      for (int64_t head = 0; head < num_heads; ++head) copy_one(token, head);
  } else {
    for (int64_t head = 0; head < num_heads; ++head)
      for (int64_t token = 0; token < count; ++token) copy_one(token, head);
  }
}

// Returns one head's share of the rows that mostly come next: those after `count` tokens, in the order of memory.
const std::byte* next_rows(const TokenMove& move, int64_t num_heads, int64_t count, const std::byte* row,
                           int64_t head) {
  const bool by_token = num_heads == 1 || move.rows.head_stride < move.rows.token_stride;
  return row + count * move.rows.token_stride + head * (by_token ? count * move.row_bytes() : move.rows.head_stride);
}

}  // namespace

void write_raw(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
               const std::byte* row, bool streaming) {
  const KVPart& cache = move.cache;
  if (is_one_run(move)) {
    std::byte* place = cache.at(block_id, offset, 0);
    return for_each_dense(move, num_heads, count, true, [&](int64_t in_cache, int64_t in_rows, int64_t bytes) {
      copy_bytes(place + in_cache, row + in_rows, bytes, streaming);
    });
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    const std::byte* next = streaming ? next_rows(move, num_heads, count, row, head) : nullptr;
    scatter_tokens(cache, cache.at(block_id, offset, head), count, move.size, row + head * move.rows.head_stride,
                   move.rows.token_stride, {streaming, next});
  }
}

void read_raw(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count, std::byte* row,
              int64_t next_block_id, bool streaming) {
  const KVPart& cache = move.cache;
  if (is_one_run(move)) {
    const std::byte* place = cache.at(block_id, offset, 0);
    return for_each_dense(move, num_heads, count, false, [&](int64_t in_cache, int64_t in_rows, int64_t bytes) {
      copy_bytes(row + in_rows, place + in_cache, bytes, streaming);
    });
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    const std::byte* next = streaming ? cache.at(next_block_id, 0, head) : nullptr;
    collect_tokens(cache, cache.at(block_id, offset, head), count, move.size, row + head * move.rows.head_stride,
                   move.rows.token_stride, {streaming, next});
  }
}

}  // namespace kvpage
