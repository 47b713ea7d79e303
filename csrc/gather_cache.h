// Reading the keys and values of sequences out of the blocks of a cache in host memory, one token after the other.
#pragma once

#include <cstdint>

#include "block_tables.h"
#include "cache_view.h"

namespace kvpage {

struct GatherCache {
  BlockView key_cache, value_cache;  // [num_blocks, block_size, num_heads, head_size]
  RowView key, value;                // of each sequence: [length, num_heads, size], from the offsets below
  int64_t key_bytes, value_bytes;    // of one head of one token, read and written
  BlockTables tables;
  const int64_t* seq_starts;  // [num_seqs]: the first token of each sequence that is read
  const int64_t* seq_lens;    // [num_seqs]: how many from there
  const int64_t* key_offsets;    // [num_seqs]: bytes from key.data to the row that gets the first token
  const int64_t* value_offsets;  // [num_seqs]: the same for value; no two rows may overlap
  int64_t num_heads;
  int max_threads;
};

// Throws InvalidArgument for a negative start or length and for a table entry that is needed and out of range, before
// anything is written.
void gather_cache(const GatherCache& args);

}  // namespace kvpage
