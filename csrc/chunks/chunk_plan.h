// ChunkPlan: bytes between the blocks of a sequence and the payload of a record, hashed on the way. It reads each byte
// once.
//
//   payload   [ layer 0: K of its tokens, V of its tokens | layer 1 | ... ]     K: [tokens, heads, size]
//   digests       xxh3-128                                   xxh3-128              or [heads, tokens, size]
//
// A layer is a stretch of the payload, or several, each with a digest of its own: layers can be moved in any order, and
// by threads. A plan is made once for all chunks of as many tokens. It moves the bytes as they are.
#pragma once

#include <cstdint>
#include <vector>

#include "chunks/stretch_writer.h"
#include "hash/xxh3.h"
#include "tokens/token_move.h"

namespace kvpage {

// The place of a chunk's tokens: those from `start` on of a sequence's blocks. `max_threads` share the layers.
// `streaming`: writes go past the processor's cache.
struct ChunkPlace {
  const int32_t* block_ids;  // [num_block_ids], of the sequence
  int64_t num_block_ids, start;
  int max_threads;
  bool streaming;
};

class ChunkPlan {
 public:
  // moves: of every layer the same number, together all of a layer's bytes; the addresses of their rows count from the
  // payload's beginning. moves_per_part: the moves of K, which are interleaved; V, where there is one, has as many.
  struct Shape {
    int64_t num_layers, moves_per_part, num_tokens, num_heads, num_blocks, block_size, layer_bytes, stretch_bytes;
  };
  // Throws InvalidArgument unless sizes are positive and fit each other, and every move copies bits.
  ChunkPlan(std::vector<TokenMove> moves, const Shape& shape);

  // Copies the layers from `first` on, as many as `num_bytes` of payload hold, from blocks to `payload`, and fills in
  // the digests of their stretches. `payload` is the address of the first of these layers. Throws InvalidArgument as
  // store_chunk does, and for layers that do not exist or are not whole, before anything is written.
  void store(const ChunkPlace& place, int64_t first, std::byte* payload, int64_t num_bytes, Digest* digests) const;

  // Returns the payload as runs of the cache's memory, in the payload's order: one for each block's tokens in each
  // part. None where the tokens are in smaller runs. Throws as store does.
  std::vector<ByteRun> runs(const ChunkPlace& place) const;

  // Copies the chunk's tokens [first_token, last_token) from `payload` to blocks; the digests are of the whole layers.
  // place.start is the position of the chunk's first token, wanted or not. Only wanted tokens need blocks. The caller
  // compares the digests afterwards.
  void load(const ChunkPlace& place, int64_t first, const std::byte* payload, int64_t num_bytes, int64_t first_token,
            int64_t last_token, Digest* digests) const;

  int64_t num_layers() const { return shape_.num_layers; }
  int64_t stretch_bytes() const { return shape_.stretch_bytes; }

 private:
  struct Part;  // K or V of a layer

  int64_t count_layers(int64_t first, int64_t num_bytes) const;
  template <typename Body>
  void for_each_layer(const ChunkPlace& place, int64_t first, int64_t num_layers, Digest* digests,
                      const Body& body) const;
  Part part(int64_t layer, int64_t index) const;
  bool is_dense(const TokenMove& move) const;
  std::vector<ByteRun> runs_of(const ChunkPlace& place, int64_t first, int64_t num_layers) const;
  void copy_runs(const ChunkPlace& place, int64_t first, std::byte* payload, int64_t num_layers, Digest* digests) const;

  std::vector<TokenMove> moves_;
  Shape shape_;
  int64_t num_parts_, part_bytes_, token_bytes_;
  bool dense_ = true, by_token_ = true;  // see chunk_plan.cpp
};

}  // namespace kvpage
