// gather_cache: reads the keys and values of sequences from the blocks of a cache in host memory, token after token.
#pragma once

#include <cstdint>

#include "tokens/block_tables.h"
#include "tokens/token_move.h"

namespace kvpage {

struct GatherCache {
  const TokenMove* parts;  // [num_parts]: K, and V where there is one; rows of each sequence from the offsets below on
  int num_parts;
  BlockTables tables;
  const int64_t* seq_starts;  // [num_seqs]: the first token of each sequence that is read
  const int64_t* seq_lens;  // [num_seqs]: how many from there
  const int64_t* row_offsets[2];  // of each part, [num_seqs]: bytes from rows.data to the row of the first token
  int64_t num_heads;
  int max_threads;
};

// Throws InvalidArgument for a negative start or length and for a table entry that is needed and out of range, before
// anything is written.
void gather_cache(const GatherCache& args);

}  // namespace kvpage
