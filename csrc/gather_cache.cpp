#include "gather_cache.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // a thread: starting one costs as much as copying a fifth of it

// Copies `num_tokens` neighbours within a block: one memcpy where they lie dense on both ends, else one a token or head.
void copy_run(const RowView& dst, const RowView& src, int64_t bytes, int64_t num_heads, int64_t num_tokens) {
  const bool dense_heads = dst.head_stride == bytes && src.head_stride == bytes;
  const int64_t token_bytes = bytes * num_heads;
  if (dense_heads && dst.token_stride == token_bytes && src.token_stride == token_bytes) {
    std::memcpy(dst.data, src.data, static_cast<size_t>(token_bytes * num_tokens));
    return;
  }
  if (dst.token_stride == bytes && src.token_stride == bytes) {  // heads outermost on both ends: HND
    for (int64_t head = 0; head < num_heads; ++head)
      std::memcpy(dst.data + head * dst.head_stride, src.data + head * src.head_stride,
                  static_cast<size_t>(bytes * num_tokens));
    return;
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (dense_heads) {
      std::memcpy(dst.row(token), src.row(token), static_cast<size_t>(token_bytes));
      continue;
    }
    for (int64_t head = 0; head < num_heads; ++head)
      std::memcpy(dst.row(token) + head * dst.head_stride, src.row(token) + head * src.head_stride,
                  static_cast<size_t>(bytes));
  }
}

// Copies tokens [begin, end) of one sequence, counted from its start, block by block.
void gather_tokens(const GatherCache& args, int64_t seq, int64_t begin, int64_t end) {
  const int64_t block_size = args.tables.block_size;
  while (begin < end) {
    const int64_t position = args.seq_starts[seq] + begin;
    const int64_t block_id = args.tables.row(seq)[position / block_size], offset = position % block_size;
    const int64_t count = std::min(end - begin, block_size - offset);
    auto copy = [&](const RowView& dst, int64_t dst_offset, const BlockView& src, int64_t bytes) {
      copy_run({dst.row(begin) + dst_offset, dst.token_stride, dst.head_stride},
               {src.row(block_id, offset), src.token_stride, src.head_stride}, bytes, args.num_heads, count);
    };
    copy(args.key, args.key_offsets[seq], args.key_cache, args.key_bytes);
    copy(args.value, args.value_offsets[seq], args.value_cache, args.value_bytes);
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
  check_sequences(args);
  // ends[i]: how many tokens the sequences up to i have together. Threads share the tokens, not the sequences.
  std::vector<int64_t> ends(static_cast<size_t>(args.tables.num_seqs));
  std::partial_sum(args.seq_lens, args.seq_lens + args.tables.num_seqs, ends.begin());
  const int64_t total = ends.empty() ? 0 : ends.back();
  const int64_t work = total * args.num_heads * (args.key_bytes + args.value_bytes);
  parallel_for(total, useful_threads(work, kGrainBytes, args.max_threads), [&](int64_t begin, int64_t end) {
    auto seq = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; begin < end; ++seq) {
      const int64_t first = ends[seq] - args.seq_lens[seq], last = std::min(end, ends[seq]);
      gather_tokens(args, seq, begin - first, last - first);
      begin = last;
    }
  });
}

}  // namespace kvpage
