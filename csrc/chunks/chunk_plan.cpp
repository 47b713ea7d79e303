#include "chunks/chunk_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"
#include "chunks/chunk_copy.h"
#include "hash/stretch_hash.h"
#include "tokens/raw_move.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // a thread: starting one costs as much as copying a fifth of it

// body(block id, offset, number of tokens, first of them): the chunk's tokens [first, last), block by block.
template <typename Body>
void for_each_block(const ChunkPlace& place, int64_t block_size, int64_t first, int64_t last, const Body& body) {
  while (first < last) {
    const int64_t position = place.start + first, offset = position % block_size;
    const int64_t count = std::min(last - first, block_size - offset);
    body(place.block_ids[position / block_size], offset, count, first);
    first += count;
  }
}

}  // namespace

struct ChunkPlan::Part {
  const TokenMove* moves;
  int64_t num_moves;
  int64_t begin;  // in the payload

  // Returns the row of a token's first head, in a part at `payload`.
  template <typename Byte>
  Byte* row(const TokenMove& move, Byte* payload, int64_t token) const {
    return payload + (reinterpret_cast<intptr_t>(move.rows.data) - begin) + token * move.rows.token_stride;
  }
};

ChunkPlan::ChunkPlan(std::vector<TokenMove> moves, const Shape& shape) : moves_(std::move(moves)), shape_(shape) {
  check(shape.num_layers > 0 && shape.moves_per_part > 0 && shape.num_tokens > 0 && shape.num_heads > 0 &&
            shape.block_size > 0 && shape.layer_bytes > 0,
        "a chunk's sizes must be positive");
  const int64_t moves_per_layer = static_cast<int64_t>(moves_.size()) / shape.num_layers;
  num_parts_ = moves_per_layer / shape.moves_per_part;
  check(num_parts_ > 0 && num_parts_ * shape.moves_per_part * shape.num_layers == static_cast<int64_t>(moves_.size()),
        "moves must be as many for each part of each layer, got ", moves_.size());
  check(shape.stretch_bytes > 0 && shape.layer_bytes % shape.stretch_bytes == 0,
        "layer_bytes must be whole stretches of ", shape.stretch_bytes, ", got ", shape.layer_bytes);
  check(shape.layer_bytes % (num_parts_ * shape.num_tokens) == 0, "layer_bytes must be whole tokens, got ",
        shape.layer_bytes);
  part_bytes_ = shape.layer_bytes / num_parts_;
  token_bytes_ = part_bytes_ / shape.num_tokens;
  for (const TokenMove& move : moves_) {
    check(move.row_type == RowType::kBits, "a chunk's rows must be the cache's bits");
    by_token_ = by_token_ && (move.rows.token_stride == token_bytes_ || shape.num_tokens == 1);
    dense_ = dense_ && is_dense(move);
  }
}

// Returns whether a block's tokens are arranged as in the payload, with nothing between them.
bool ChunkPlan::is_dense(const TokenMove& move) const {
  const int64_t bytes = move.row_bytes();
  const bool dense_heads = shape_.num_heads == 1 || (move.cache.head_stride == bytes && move.rows.head_stride == bytes);
  return shape_.moves_per_part == 1 && is_one_run(move) && dense_heads && bytes * shape_.num_heads == token_bytes_ &&
         (shape_.block_size == 1 || move.cache.token_stride == token_bytes_) &&
         (shape_.num_tokens == 1 || move.rows.token_stride == token_bytes_);
}

ChunkPlan::Part ChunkPlan::part(int64_t layer, int64_t index) const {
  const int64_t at = layer * num_parts_ + index;
  return {moves_.data() + at * shape_.moves_per_part, shape_.moves_per_part, at * part_bytes_};
}

int64_t ChunkPlan::count_layers(int64_t first, int64_t num_bytes) const {
  const int64_t count = num_bytes / shape_.layer_bytes;
  check(num_bytes >= 0 && num_bytes % shape_.layer_bytes == 0, "num_bytes must be whole layers of ", shape_.layer_bytes,
        ", got ", num_bytes);
  check(first >= 0 && first <= shape_.num_layers - count, "layers must be in [0, ", shape_.num_layers, "), got ", first,
        " to ", first + count);
  return count;
}

// body(layer, number of it, hash)
template <typename Body>
void ChunkPlan::for_each_layer(const ChunkPlace& place, int64_t first, int64_t num_layers, Digest* digests,
                               const Body& body) const {
  const int num_threads = useful_threads(num_layers * shape_.layer_bytes, kGrainBytes, place.max_threads);
  const int64_t stretches_per_layer = shape_.layer_bytes / shape_.stretch_bytes;
  parallel_for(num_layers, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      StretchHash hash(shape_.stretch_bytes, digests + i * stretches_per_layer);
      body(first + i, i, hash);
    }
    if (place.streaming) end_streaming();
  });
}

// Returns the runs of dense layers, in the payload's order.
std::vector<ByteRun> ChunkPlan::runs_of(const ChunkPlace& place, int64_t first, int64_t num_layers) const {
  std::vector<ByteRun> runs;
  for (int64_t layer = first; layer < first + num_layers; ++layer)
    for (int64_t index = 0; index < num_parts_; ++index)
      for_each_block(place, shape_.block_size, 0, shape_.num_tokens,
                     [&](int32_t block_id, int64_t offset, int64_t count, int64_t) {
                       runs.push_back({part(layer, index).moves->cache.at(block_id, offset, 0), count * token_bytes_});
                     });
  return runs;
}

std::vector<ByteRun> ChunkPlan::runs(const ChunkPlace& place) const {
  check_chunk_blocks(place.block_ids, place.num_block_ids, shape_.num_blocks, shape_.block_size, place.start,
                     shape_.num_tokens);
  return dense_ ? runs_of(place, 0, shape_.num_layers) : std::vector<ByteRun>{};
}

// While a run is copied, the beginning of the next is fetched, which no processor can foresee.
void ChunkPlan::copy_runs(const ChunkPlace& place, int64_t first, std::byte* payload, int64_t num_layers,
                          Digest* digests) const {
  const std::vector<ByteRun> all = runs_of(place, first, num_layers);
  const int64_t runs_per_layer = static_cast<int64_t>(all.size()) / num_layers;
  for_each_layer(place, first, num_layers, digests, [&](int64_t, int64_t i, StretchHash& hash) {
    std::byte* to = payload + i * shape_.layer_bytes;
    for (int64_t at = i * runs_per_layer; at < (i + 1) * runs_per_layer; ++at) {
      const auto [data, num_bytes] = all[static_cast<size_t>(at)];
      hash.update_and_copy(data, num_bytes, to, place.streaming, all[std::min<size_t>(at + 1, all.size() - 1)].data);
      to += num_bytes;
    }
  });
}

void ChunkPlan::store(const ChunkPlace& place, int64_t first, std::byte* payload, int64_t num_bytes,
                      Digest* digests) const {
  check_chunk_blocks(place.block_ids, place.num_block_ids, shape_.num_blocks, shape_.block_size, place.start,
                     shape_.num_tokens);
  const int64_t num_layers = count_layers(first, num_bytes);
  if (num_layers == 0) return;
  if (dense_) return copy_runs(place, first, payload, num_layers, digests);
  const auto store_part = [&](const Part& part, std::byte* to, StretchHash& hash) {
    for_each_block(place, shape_.block_size, 0, shape_.num_tokens,
                   [&](int32_t block_id, int64_t offset, int64_t count, int64_t token) {
                     for (int64_t i = 0; i < part.num_moves; ++i)
                       read_raw(part.moves[i], shape_.num_heads, block_id, offset, count,
                                part.row(part.moves[i], to, token), block_id, false);
                     if (by_token_) hash.update(to + token * token_bytes_, count * token_bytes_);
                   });
    if (!by_token_) hash.update(to, part_bytes_);
  };
  for_each_layer(place, first, num_layers, digests, [&](int64_t layer, int64_t i, StretchHash& hash) {
    for (int64_t index = 0; index < num_parts_; ++index)
      store_part(part(layer, index), payload + i * shape_.layer_bytes + index * part_bytes_, hash);
  });
}

void ChunkPlan::load(const ChunkPlace& place, int64_t first, const std::byte* payload, int64_t num_bytes,
                     int64_t first_token, int64_t last_token, Digest* digests) const {
  check(0 <= first_token && first_token <= last_token && last_token <= shape_.num_tokens, "tokens must be in [0, ",
        shape_.num_tokens, "], got ", first_token, " to ", last_token);
  check_chunk_blocks(place.block_ids, place.num_block_ids, shape_.num_blocks, shape_.block_size,
                     place.start + first_token, last_token - first_token);
  const auto load_part = [&](const Part& part, const std::byte* from, StretchHash& hash) {
    hash.update(from, dense_ ? first_token * token_bytes_ : part_bytes_);
    for_each_block(place, shape_.block_size, first_token, last_token,
                   [&](int32_t block_id, int64_t offset, int64_t count, int64_t token) {
                     const std::byte* const tokens = from + token * token_bytes_;
                     if (dense_)
                       return hash.update_and_copy(tokens, count * token_bytes_,
                                                   part.moves->cache.at(block_id, offset, 0), place.streaming,
                                                   tokens + count * token_bytes_);
                     for (int64_t i = 0; i < part.num_moves; ++i)
                       write_raw(part.moves[i], shape_.num_heads, block_id, offset, count,
                                 part.row(part.moves[i], from, token), place.streaming);
                   });
    if (dense_) hash.update(from + last_token * token_bytes_, (shape_.num_tokens - last_token) * token_bytes_);
  };
  for_each_layer(place, first, count_layers(first, num_bytes), digests,
                 [&](int64_t layer, int64_t i, StretchHash& hash) {
                   for (int64_t index = 0; index < num_parts_; ++index)
                     load_part(part(layer, index), payload + i * shape_.layer_bytes + index * part_bytes_, hash);
                 });
}

}  // namespace kvpage
