// TokenMove: K or V of tokens between rows and the slots of a cache, whatever the cache's layout and codec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tokens/row_view.h"
#include "tokens/kv_part.h"
#include "quantize/row_codec.h"

namespace kvpage {

struct TokenMove {
  KVPart cache;
  RowView rows;  // [num_tokens, num_heads, size]
  RowType row_type;
  Codec codec;
  int64_t size;  // elements of a head in the rows; as many are written or read in the cache
  // fp32 [1] or [num_heads], null: 1. Of fp8.
  const float* head_scales;
  int64_t head_scale_stride;  // elements; 0 for one scale
  // One a scale, or null: without tables the same comes out, slower. See quantized_move.h.
  const EncodeTable* encode_tables = nullptr;
  const DecodeTable* decode_tables = nullptr;

  int64_t row_bytes() const { return size * row_element_bytes(row_type, cache.element_bytes); }
};

inline bool is_one_run(const TokenMove& move) { return move.cache.run_size >= move.size; }

// Throws InvalidArgument for what no cache is: heads of no elements, blocks without tokens or more of them than ids have
// room for, unknown kinds, a codec for elements that it does not know. What an address leads to is the caller's word.
void check_moves(std::span<const TokenMove> moves, int64_t num_heads, int64_t num_tokens);
void check_blocks_of_cache(int64_t num_blocks, int64_t block_size);

// Moves `count` tokens that follow each other in a block, from `offset` on, and whose rows follow each other from
// `row` on (the first head's address). `streaming`: past the processor's cache, where runs are long; the caller fences.
// `next_block_id`: the block that is read next, and asked for meanwhile; `block_id` where there is none.
void write_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                  const std::byte* row, bool streaming);
void read_tokens(const TokenMove& move, int64_t num_heads, int64_t block_id, int64_t offset, int64_t count,
                 std::byte* row, int64_t next_block_id, bool streaming);

}  // namespace kvpage
