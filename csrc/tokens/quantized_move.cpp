#include "tokens/quantized_move.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/copy_bytes.h"
#include "base/prefetch.h"
#include "quantize/quantize_kernel.h"
#include "tokens/kv_part.h"

namespace kvpage {
namespace {

constexpr int64_t kLine = 64, kScaleBytes = sizeof(float);
constexpr int64_t kCodesAtOnce = 64 << 10;  // bytes that a thread turns around in its second-level cache
constexpr int64_t kRowsAhead = 4 << 10;  // bytes; nearer it comes too late, a block further no better, or worse

// Returns memory of this thread, valid until its next call. Begins at a cache line.
std::byte* scratch(int64_t bytes) {
  thread_local std::vector<std::byte> buffer;
  if (static_cast<int64_t>(buffer.size()) < bytes + kLine) buffer.resize(static_cast<size_t>(bytes + kLine));
  return buffer.data() + (-reinterpret_cast<intptr_t>(buffer.data()) & (kLine - 1));
}

// How rows and codes pass the processor's cache. `past_cache`: writes go past it. `ahead`: the distance in bytes from
// the row that is read to the one that is read soon after, which is fetched meanwhile; 0 fetches nothing. Blocks come
// in any order, which the processor cannot foresee. It foresees rows in a row by itself, unless a block's codes are
// transposed in between, or int8 reads each row twice.
struct Flow {
  bool past_cache = false;
  int64_t ahead = 0;

  void ask(const std::byte* from, int64_t bytes) const {
    if (ahead != 0) prefetch(from + ahead, bytes);
  }
};

// Heads that are adjacent on both sides and share one scale become one head, many times as long.
TokenMove with_merged_heads(TokenMove move, int64_t& num_heads) {
  const bool shares_scale = is_fp8(move.code_type) && move.num_scales(num_heads) == 1;
  const bool dense = move.cache.head_stride == move.size && move.rows.head_stride == move.row_bytes();
  if (!shares_scale || !dense || !is_one_run(move)) return move;
  move.size *= num_heads;
  move.cache.run_size = move.size;
  num_heads = 1;
  return move;
}

// Calls body(head, first token, number of tokens) in the order of the memory that is read, with these strides.
template <typename Body>
void for_each_head(int64_t head_stride, int64_t token_stride, int64_t num_heads, int64_t count, const Body& body) {
  if (num_heads > 1 && head_stride < token_stride) {
    for (int64_t token = 0; token < count; ++token)
      for (int64_t head = 0; head < num_heads; ++head) body(head, token, 1);
  } else {
    for (int64_t head = 0; head < num_heads; ++head) body(head, 0, count);
  }
}

// One head of `count` tokens: rows to codes in rows of `stride` bytes.
void encode_tokens(const TokenMove& move, int64_t head, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* rows, std::byte* codes, int64_t stride, const Flow& flow) {
  const QuantizeKernel& kernel = quantize_kernels().best();
  const EncodeTable* table = move.encode_tables ? move.encode_tables + head * move.head_scale_stride : nullptr;
  for (int64_t token = 0; token < count; ++token, rows += move.rows.token_stride, codes += stride) {
    flow.ask(rows, move.row_bytes());
    if (table) {
      kernel.encode_by_table(*table, rows, move.size, codes, flow.past_cache);
      continue;
    }
    const float scale =
        kernel.encode(move.code_type, move.row_type, rows, move.size, move.head_scale(head), codes, flow.past_cache);
    if (move.code_type == CodeType::kInt8) *move.cache.scale_at(block_id, offset + token, head) = scale;
  }
}

void decode_tokens(const TokenMove& move, int64_t head, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* codes, int64_t stride, std::byte* rows, const Flow& flow) {
  const QuantizeKernel& kernel = quantize_kernels().best();
  const DecodeTable* table = move.decode_tables ? move.decode_tables + head * move.head_scale_stride : nullptr;
  for (int64_t token = 0; token < count; ++token, codes += stride, rows += move.rows.token_stride) {
    flow.ask(codes, move.size);
    if (table) {
      kernel.decode_by_table(*table, codes, move.size, rows, flow.past_cache);
      continue;
    }
    const float scale = move.code_type == CodeType::kInt8 ? *move.cache.scale_at(block_id, offset + token, head)
                                                          : move.head_scale(head);
    kernel.decode(move.code_type, move.row_type, codes, move.size, scale, rows, flow.past_cache);
  }
}

// int8 of bf16: `num` heads of a token or tokens of a head at once.
void encode_batch(const TokenMove& move, int64_t head, int64_t block_id, int64_t offset, const RowBatch& batch,
                  int64_t scale_stride) {
  constexpr int64_t kAtOnce = 64;
  float scales[kAtOnce];
  std::byte* place = reinterpret_cast<std::byte*>(move.cache.scale_at(block_id, offset, head));
  for (int64_t first = 0; first < batch.num_rows; first += kAtOnce) {
    const int64_t num = std::min(kAtOnce, batch.num_rows - first);
    quantize_kernels().best().encode_int8_bf16(batch.part(first, num), scales);
    for (int64_t i = 0; i < num; ++i) std::memcpy(place + (first + i) * scale_stride, &scales[i], sizeof(float));
  }
}

void write_int8_run(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                    const std::byte* row, const Flow& flow) {
  const KVPart& cache = move.cache;
  if (move.rows.head_stride < move.rows.token_stride) {
    for (int64_t token = 0; token < count; ++token)
      encode_batch(move, 0, block_id, offset + token,
                   {row + token * move.rows.token_stride, move.rows.head_stride, cache.at(block_id, offset + token, 0),
                    cache.head_stride, num_heads, move.size, flow.ahead},
                   cache.scale_head_stride);
  } else {
    for (int64_t head = 0; head < num_heads; ++head)
      encode_batch(move, head, block_id, offset,
                   {row + head * move.rows.head_stride, move.rows.token_stride, cache.at(block_id, offset, head),
                    cache.token_stride, count, move.size, flow.ahead},
                   cache.scale_token_stride);
  }
}

void write_one_run(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                   const std::byte* row, const Flow& flow) {
  if (move.code_type == CodeType::kInt8 && move.row_type == RowType::kBfloat16)
    return write_int8_run(move, num_heads, block_id, offset, count, row, flow);
  const TokenMove merged = with_merged_heads(move, num_heads);
  const RowView& rows = move.rows;
  for_each_head(rows.head_stride, rows.token_stride, num_heads, count, [&](int64_t head, int64_t first, int64_t num) {
    encode_tokens(merged, head, block_id, offset + first, num,
                  row + head * rows.head_stride + first * rows.token_stride,
                  move.cache.at(block_id, offset + first, head), move.cache.token_stride, flow);
  });
}

void read_one_run(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                  std::byte* row, const Flow& flow) {
  const TokenMove merged = with_merged_heads(move, num_heads);
  const KVPart& cache = move.cache;
  for_each_head(cache.head_stride, cache.token_stride, num_heads, count, [&](int64_t head, int64_t first, int64_t num) {
    decode_tokens(merged, head, block_id, offset + first, num, cache.at(block_id, offset + first, head),
                  cache.token_stride, row + head * move.rows.head_stride + first * move.rows.token_stride, flow);
  });
}

// --- int8 past the cache -------------------------------------------------------------------------------------------
//
// A head's codes and the scale after them are seldom whole lines, but those of all heads of a few tokens mostly are:
// they are put together in the first-level cache, and go past it from there.
//
//   NHD   [ codes | scale ][ codes | scale ] ... of a token's heads, then of the next token's

// Returns whether heads and tokens are arranged like that, nothing between them.
bool is_dense_with_scales(const TokenMove& move, int64_t num_heads) {
  const KVPart& cache = move.cache;
  return move.code_type == CodeType::kInt8 && cache.head_stride == move.size + kScaleBytes &&
         cache.token_stride == num_heads * cache.head_stride && cache.scales == cache.data + move.size &&
         cache.scale_block_stride == cache.block_stride && cache.scale_token_stride == cache.token_stride &&
         cache.scale_head_stride == cache.head_stride;
}

void write_dense_with_scales(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                             const std::byte* row) {
  const int64_t token_bytes = move.cache.token_stride, whole_lines = kLine / std::gcd(token_bytes, kLine);
  TokenMove staged = move;
  staged.cache.data = scratch(whole_lines * token_bytes);
  staged.cache.scales = staged.cache.data + move.size;
  for (int64_t first = 0; first < count; first += whole_lines) {
    const int64_t num = std::min(whole_lines, count - first);
    write_one_run(staged, num_heads, 0, 0, num, row + first * move.rows.token_stride, {false, kRowsAhead});
    copy_bytes(move.cache.at(block_id, offset + first, 0), staged.cache.data, num * token_bytes, true);
  }
}

// A token's codes of all heads are dense. From one token to the next is a line more: without it 16 tokens would
// share few sets of the processor's cache.
int64_t code_stride(const TokenMove& move, int64_t num_heads) {
  return (num_heads * move.size + kLine - 1) / kLine * kLine + kLine;
}

// Returns the move with codes token by token, in place of the cache's from the token at `offset` on. Scales are still
// the cache's.
TokenMove with_codes(TokenMove move, int64_t num_heads, int64_t block_id, int64_t offset, std::byte* codes) {
  KVPart& cache = move.cache;
  if (cache.scales) cache.scales = reinterpret_cast<std::byte*>(cache.scale_at(block_id, offset, 0));
  cache.data = codes;
  cache.token_stride = code_stride(move, num_heads);
  cache.head_stride = cache.run_size = move.size;
  return move;
}

// The scales of a block that is written as a whole are dense in the backend "paged": they are put together, too, and go
// past the cache from there.
class StagedScales {
 public:
  StagedScales(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t count)
      : to_(move.cache.scale_at(block_id, 0, 0)), count_(num_heads * count) {}

  static bool fit(const TokenMove& move, int64_t num_heads, int64_t count) {
    const KVPart& cache = move.cache;
    return move.code_type == CodeType::kInt8 && cache.scale_token_stride == kScaleBytes &&
           cache.scale_head_stride == count * kScaleBytes && num_heads * count <= kMost;
  }

  TokenMove in_place_of_the_caches(TokenMove move) {
    move.cache.scales = reinterpret_cast<std::byte*>(scales_);
    move.cache.scale_block_stride = 0;
    return move;
  }

  void write() const {
    copy_bytes(reinterpret_cast<std::byte*>(to_), reinterpret_cast<const std::byte*>(scales_), count_ * kScaleBytes,
               true);
  }

 private:
  static constexpr int64_t kMost = 1024;
  float* to_;
  int64_t count_;
  alignas(kLine) float scales_[kMost];
};

// body(first token, number of tokens, codes) for parts of a block's tokens whose codes fit into the scratch.
template <typename Body>
void for_each_part(const TokenMove& move, int64_t num_heads, int64_t count, const Body& body) {
  const int64_t token_codes = code_stride(move, num_heads);
  const int64_t at_once = std::clamp<int64_t>(kCodesAtOnce / token_codes, 1, count);
  std::byte* codes = scratch(at_once * token_codes);
  for (int64_t first = 0; first < count; first += at_once) body(first, std::min(at_once, count - first), codes);
}

// Writes by way of codes that are arranged token by token.
void write_runs(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                const std::byte* row, bool streaming) {
  for_each_part(move, num_heads, count, [&](int64_t first, int64_t num, std::byte* codes) {
    const TokenMove encoded = with_codes(move, num_heads, block_id, offset + first, codes);
    write_one_run(encoded, num_heads, 0, 0, num, row + first * move.rows.token_stride,
                  {false, streaming ? kRowsAhead : 0});
    for (int64_t head = 0; head < num_heads; ++head)
      scatter_tokens(move.cache, move.cache.at(block_id, offset + first, head), num, move.size,
                     codes + head * move.size, code_stride(move, num_heads), {streaming, nullptr});
  });
}

}  // namespace

void write_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                     const std::byte* row, bool streaming) {
  if (is_one_run(move)) {
    if (streaming && is_dense_with_scales(move, num_heads))
      return write_dense_with_scales(move, num_heads, block_id, offset, count, row);
    const int64_t ahead = streaming && move.code_type == CodeType::kInt8 ? kRowsAhead : 0;
    return write_one_run(move, num_heads, block_id, offset, count, row, {streaming, ahead});
  }
  if (streaming && StagedScales::fit(move, num_heads, count)) {
    StagedScales scales(move, num_heads, block_id, count);
    write_runs(scales.in_place_of_the_caches(move), num_heads, block_id, offset, count, row, streaming);
    return scales.write();
  }
  write_runs(move, num_heads, block_id, offset, count, row, streaming);
}

void read_quantized(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                    std::byte* row, int64_t next_block_id, bool streaming) {
  if (is_one_run(move)) {
    const int64_t ahead = move.cache.at(next_block_id, 0, 0) - move.cache.at(block_id, offset, 0);
    return read_one_run(move, num_heads, block_id, offset, count, row, {streaming, streaming ? ahead : 0});
  }
  for_each_part(move, num_heads, count, [&](int64_t first, int64_t num, std::byte* codes) {
    for (int64_t head = 0; head < num_heads; ++head) {
      if (streaming) prefetch(move.cache.at(next_block_id, 0, head) + first * move.size, num * move.size);
      collect_tokens(move.cache, move.cache.at(block_id, offset + first, head), num, move.size,
                     codes + head * move.size, code_stride(move, num_heads), {});
    }
    const TokenMove encoded = with_codes(move, num_heads, block_id, offset + first, codes);
    read_one_run(encoded, num_heads, 0, 0, num, row + first * move.rows.token_stride, {streaming, 0});
  });
}

}  // namespace kvpage
