// PagedAttention: what a call of attention over blocks is given. Owns nothing.
#pragma once

#include <cstdint>
#include <string>

#include "attention/attention_kernel.h"
#include "quantize/code_type.h"
#include "tokens/block_tables.h"
#include "tokens/kv_part.h"
#include "tokens/row_view.h"

namespace kvpage {

struct PagedAttention {
  RowView query, out;                // [num_tokens, num_kv_heads * group_size, key_size or value_size]
  KVPart key_cache, value_cache;     // the same for latents, whose first elements are the values
  ElementType query_type, cache_type;  // cache_type: of elements that are no codes
  CodeType code_type;
  const float* key_scales;  // fp32, of fp8's heads, or null: 1
  int64_t key_scale_stride;  // elements; 0 for one scale
  const float* value_scales;
  int64_t value_scale_stride;
  BlockTables tables;
  const int64_t* seq_lens;    // [num_seqs]: keys of a sequence, its queries' own included
  const int64_t* query_lens;  // [num_seqs]: queries of a sequence, at most its length
  const int64_t* positions;   // [num_tokens]: of each query in its sequence, ascending in each; null: its last ones
  int64_t num_tokens;         // the sum of query_lens
  int64_t num_kv_heads, group_size, key_size, value_size;
  int64_t window;       // keys that a query sees, its own included; more than any sequence has: all
  float scale, softcap;  // softcap 0: none
  const float* sinks;    // [num_kv_heads * group_size] or null
  int max_threads;
  std::string kernel;  // the name of one of attention_kernels(); empty: the best
};

}  // namespace kvpage
