#include "tokens/gather_cache.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"
#include "tokens/move_tokens.h"
#include "tokens/tabled_moves.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // a thread: starting one costs as much as copying a fifth of it

// Copies tokens [begin, end) of one sequence, counted from its start, block by block.
void gather_tokens(const GatherCache& args, const TabledMoves& parts, int64_t seq, int64_t begin, int64_t end,
                   bool streaming) {
  const int64_t block_size = args.tables.block_size;
  while (begin < end) {
    const int64_t position = args.seq_starts[seq] + begin;
    const int64_t block_id = args.tables.row(seq)[position / block_size], offset = position % block_size;
    const int64_t count = std::min(end - begin, block_size - offset);
    const int64_t next_block_id = begin + count < end ? args.tables.row(seq)[position / block_size + 1] : block_id;
    for (int i = 0; i < args.num_parts; ++i)
      read_tokens(parts[i], args.num_heads, block_id, offset, count,
                  parts[i].rows.row(begin) + args.row_offsets[i][seq], next_block_id, streaming);
    begin += count;
  }
}

void check_sequences(const GatherCache& args) {
  for (int64_t seq = 0; seq < args.tables.num_seqs; ++seq) {
    const int64_t start = args.seq_starts[seq], length = args.seq_lens[seq];
    const int64_t capacity = args.tables.capacity();
    check(length >= 0, "seq_lens[", seq, "] must not be negative, got ", length);
    check(start >= 0, "seq_starts[", seq, "] must not be negative, got ", start);
    check(length <= capacity && start <= capacity - length, "block_tables[", seq, "] must hold the blocks of ", length,
          " tokens from ", start, ", got room for ", capacity);
    args.tables.check_range(seq, start, start + length);
  }
}

}  // namespace

void gather_cache(const GatherCache& args) {
  check_moves({args.parts, static_cast<size_t>(args.num_parts)}, args.num_heads, 0);
  args.tables.check_sizes();
  check_sequences(args);
  // ends[i]: how many tokens the sequences up to i have together. Threads share the tokens, not the sequences.
  std::vector<int64_t> ends(static_cast<size_t>(args.tables.num_seqs));
  std::partial_sum(args.seq_lens, args.seq_lens + args.tables.num_seqs, ends.begin());
  const int64_t total = ends.empty() ? 0 : ends.back();
  int64_t work = 0;
  for (int i = 0; i < args.num_parts; ++i) work += total * args.num_heads * args.parts[i].row_bytes();
  const bool streaming = work >= streaming_threshold();
  const TabledMoves parts = TabledMoves::for_reads(args.parts, args.num_parts, args.num_heads, total);
  parallel_for(total, useful_threads(work, kGrainBytes, args.max_threads), [&](int64_t begin, int64_t end) {
    auto seq = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; begin < end; ++seq) {
      const int64_t first = ends[seq] - args.seq_lens[seq], last = std::min(end, ends[seq]);
      gather_tokens(args, parts, seq, begin - first, last - first, streaming);
      begin = last;
    }
    if (streaming) end_streaming();
  });
}

}  // namespace kvpage
