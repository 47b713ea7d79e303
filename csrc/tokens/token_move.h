// TokenMove: K or V of tokens between rows and the slots of a cache of any layout and code type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "quantize/code_table.h"
#include "quantize/code_type.h"
#include "tokens/kv_part.h"
#include "tokens/row_view.h"

namespace kvpage {

struct TokenMove {
  KVPart cache;
  RowView rows;  // [num_tokens, num_heads, size]
  RowType row_type;
  CodeType code_type;
  int64_t size;  // elements of a head in the rows; as many are written or read in the cache
  // fp32 [1] or [num_heads], null: 1. Of fp8.
  const float* head_scales;
  int64_t head_scale_stride;  // elements; 0 for one scale
  // One a scale, or null: without tables the same comes out, slower. See tabled_moves.h.
  const EncodeTable* encode_tables = nullptr;
  const DecodeTable* decode_tables = nullptr;

  int64_t row_bytes() const { return size * row_element_bytes(row_type, cache.element_bytes); }
  float head_scale(int64_t head) const { return head_scales ? head_scales[head * head_scale_stride] : 1.0f; }
  int64_t num_scales(int64_t num_heads) const { return head_scales && head_scale_stride != 0 ? num_heads : 1; }
};

inline bool is_one_run(const TokenMove& move) { return move.cache.run_size >= move.size; }

// Throw InvalidArgument for heads of no elements, blocks without tokens, more blocks than ids have room for, unknown
// types, and codes of more than one byte. Nothing checks the memory at an address.
void check_moves(std::span<const TokenMove> moves, int64_t num_heads, int64_t num_tokens);
void check_blocks_of_cache(int64_t num_blocks, int64_t block_size);

}  // namespace kvpage
