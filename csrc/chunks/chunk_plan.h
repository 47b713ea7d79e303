// ChunkPlan: between the blocks of a sequence and the payload of a record, hashed on the way: every byte is read once.
//
//   payload   [ layer 0: K of its tokens, V of its tokens | layer 1 | ... ]     K: [tokens, heads, size] or [heads, tokens, size]
//   digests       xxh3-128                                   xxh3-128
//
// A layer is a stretch of the payload, with a digest of its own: so layers can be moved in any order, and by threads.
// Made once for all chunks of as many tokens; moves the bytes as they are.
#pragma once

#include <cstdint>
#include <vector>

#include "chunks/stretch_writer.h"
#include "tokens/token_move.h"
#include "hash/xxh3.h"

namespace kvpage {

// Where a chunk's tokens lie: those from `start` on of a sequence's blocks. max_threads: that share the layers.
// `streaming`: what is written goes past the processor's cache.
struct ChunkPlace {
  const int32_t* block_ids;  // [num_block_ids], of the sequence
  int64_t num_block_ids, start;
  int max_threads;
  bool streaming;
};

class ChunkPlan {
 public:
  // moves: of every layer the same number, together all of a layer's bytes; the addresses of their rows count from the
  // payload's beginning. moves_per_part: moves of K, that lie among each other; V, where there is one, has as many.
  struct Shape {
    int64_t num_layers, moves_per_part, num_tokens, num_heads, num_blocks, block_size, layer_bytes;
  };
  // Throws InvalidArgument unless sizes are positive and fit each other, and every move copies bits.
  ChunkPlan(std::vector<TokenMove> moves, const Shape& shape);

  // The layers from `first` on, as many as `num_bytes` of payload hold, from blocks to `payload`, which is the first of
  // these layers; their digests. Throw InvalidArgument as store_chunk does, and for layers that are not there or not
  // whole, before anything is written.
  void store(const ChunkPlace& place, int64_t first, std::byte* payload, int64_t num_bytes, Digest* digests) const;

  // All of the payload where it lies, in its order, a run for the tokens of each block in each part; none where it lies in
  // smaller runs. Throws as store does.
  std::vector<ByteRun> runs(const ChunkPlace& place) const;

  // The way back, of the chunk's tokens [first_token, last_token) alone; the digests are of all. place.start: of the
  // chunk's first token, whether it is wanted or not; blocks have to be there for those that are. Whether the digests
  // are the right ones the caller finds out afterwards.
  void load(const ChunkPlace& place, int64_t first, const std::byte* payload, int64_t num_bytes, int64_t first_token,
            int64_t last_token, Digest* digests) const;

  int64_t num_layers() const { return shape_.num_layers; }
  int64_t layer_bytes() const { return shape_.layer_bytes; }

 private:
  struct Part;  // K or V of a layer

  int64_t count_layers(int64_t first, int64_t num_bytes) const;
  template <typename Body>
  void for_each_layer(const ChunkPlace& place, int64_t first, int64_t num_layers, Digest* digests, const Body& body) const;
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
