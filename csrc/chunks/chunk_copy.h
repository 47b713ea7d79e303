// Tokens of a sequence between its blocks in all layers and one chunk: [num_layers, parts, num_tokens, num_heads,
// size].
#pragma once

#include <cstdint>
#include <vector>

#include "tokens/token_move.h"

namespace kvpage {

struct ChunkCopy {
  std::vector<TokenMove> parts;  // of every layer, K then V where there is one; rows: the chunk's
  const int32_t* block_ids;      // [num_block_ids], of the sequence
  int64_t num_block_ids, num_blocks, block_size;
  int64_t start, num_tokens;  // the sequence's tokens that the chunk holds
  int64_t num_heads;
  int max_threads;
};

// Blocks to chunk, and back. Throw InvalidArgument for a negative start, tokens beyond the blocks, and a block id that
// is needed and out of range, before anything is written. Two tokens may name one block only when reading.
void store_chunk(const ChunkCopy& args);
void load_chunk(const ChunkCopy& args);

// Throws InvalidArgument unless `num_tokens` from `start` on are in blocks of the cache.
void check_chunk_blocks(const int32_t* block_ids, int64_t num_block_ids, int64_t num_blocks, int64_t block_size,
                        int64_t start, int64_t num_tokens);

}  // namespace kvpage
