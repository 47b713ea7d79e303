#include "chunks/chunk_copy.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"
#include "tokens/move_tokens.h"
#include "tokens/tabled_moves.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // a thread: starting one costs as much as copying a fifth of it

void check_blocks(const ChunkCopy& args) {
  check_moves(args.parts, args.num_heads, args.num_tokens);
  check_blocks_of_cache(args.num_blocks, args.block_size);
  check_chunk_blocks(args.block_ids, args.num_block_ids, args.num_blocks, args.block_size, args.start, args.num_tokens);
}

// body(part, block id, offset, number of tokens, first row, next block id, streaming):
// each layer's parts, block by block; threads share them all.
template <typename Body>
void for_each_run(const ChunkCopy& args, const TabledMoves& parts, const Body& body) {
  int64_t work = 0;
  for (const TokenMove& part : args.parts) work += args.num_tokens * args.num_heads * part.row_bytes();
  const bool streaming = work >= streaming_threshold();
  const int64_t num_parts = static_cast<int64_t>(args.parts.size());
  parallel_for(num_parts * args.num_tokens, useful_threads(work, kGrainBytes, args.max_threads),
               [&](int64_t begin, int64_t end) {
                 while (begin < end) {
                   const TokenMove& part = parts[static_cast<int>(begin / args.num_tokens)];
                   const int64_t token = begin % args.num_tokens, position = args.start + token;
                   const int64_t offset = position % args.block_size;
                   const int64_t count = std::min({end - begin, args.num_tokens - token, args.block_size - offset});
                   const int32_t* block_id = args.block_ids + position / args.block_size;
                   const bool is_last = count == std::min(end - begin, args.num_tokens - token);
                   body(part, *block_id, offset, count, part.rows.row(token), is_last ? *block_id : block_id[1],
                        streaming);
                   begin += count;
                 }
                 if (streaming) end_streaming();
               });
}

}  // namespace

void check_chunk_blocks(const int32_t* block_ids, int64_t num_block_ids, int64_t num_blocks, int64_t block_size,
                        int64_t start, int64_t num_tokens) {
  check(start >= 0, "start must not be negative, got ", start);
  check(num_block_ids >= 0 && num_block_ids <= std::numeric_limits<int32_t>::max(),
        "num_block_ids must be in [0, 2**31), got ", num_block_ids);
  const int64_t room = num_block_ids * block_size;
  check(num_tokens <= room && start <= room - num_tokens, "block_ids must hold the blocks of ", num_tokens,
        " tokens from ", start, ", got room for ", room);
  if (num_tokens == 0) return;
  for (int64_t i = start / block_size; i <= (start + num_tokens - 1) / block_size; ++i)
    check(block_ids[i] >= 0 && block_ids[i] < num_blocks, "block_ids[", i, "] must be in [0, ", num_blocks, "), got ",
          block_ids[i]);
}

void store_chunk(const ChunkCopy& args) {
  check_blocks(args);
  const TabledMoves parts =
      TabledMoves::for_reads(args.parts.data(), static_cast<int>(args.parts.size()), args.num_heads, args.num_tokens);
  for_each_run(args, parts,
               [&](const TokenMove& part, int64_t block_id, int64_t offset, int64_t count, std::byte* row,
                   int64_t next_block_id, bool streaming) {
                 read_tokens(part, args.num_heads, block_id, offset, count, row, next_block_id, streaming);
               });
}

void load_chunk(const ChunkCopy& args) {
  check_blocks(args);
  const TabledMoves parts =
      TabledMoves::for_writes(args.parts.data(), static_cast<int>(args.parts.size()), args.num_heads, args.num_tokens);
  for_each_run(
      args, parts,
      [&](const TokenMove& part, int64_t block_id, int64_t offset, int64_t count, const std::byte* row, int64_t,
          bool streaming) { write_tokens(part, args.num_heads, block_id, offset, count, row, streaming); });
}

}  // namespace kvpage
