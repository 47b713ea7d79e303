// SequenceRows: tokens that are written, and the blocks that they fill.
#include <algorithm>
#include <new>

#include "base/check.h"
#include "sequences/sequence_rows.h"

namespace kvpage {
namespace {

void check_room(const Sequence& sequence, int64_t count) {
  check(sequence.num_written + count <= sequence.num_tokens, "commit must not exceed the ", sequence.num_tokens,
        " tokens that there is room for, got ", sequence.num_written, " + ", count);
}

}  // namespace

int64_t SequenceRows::commit(int64_t row, const TokenView& tokens) {
  std::lock_guard lock(mutex_);
  Sequence& sequence = at(row);
  check_room(sequence, tokens.size());
  const int64_t num_cached = shares(sequence) ? commit_shared(sequence, tokens) : 0;
  sequence.num_written += tokens.size();
  return num_cached;
}

// Returns how many blocks are full now.
int64_t SequenceRows::commit_shared(Sequence& sequence, const TokenView& tokens) {
  const int64_t before = static_cast<int64_t>(sequence.pending.size()), total = before + tokens.size();
  const int64_t num_full = total / block_size_, rest = total % block_size_;
  tokens.check_fits(0, tokens.size());
  sequence.pending.reserve(static_cast<size_t>(num_full > 0 ? rest : total));
  if (num_full == 0) {
    sequence.pending.resize(static_cast<size_t>(total));
    tokens.copy_to(0, tokens.size(), sequence.pending.data() + before);
    return 0;
  }
  if (before == 0) {
    cache_blocks(sequence, tokens.first(num_full * block_size_));
    sequence.pending.resize(static_cast<size_t>(rest));
    tokens.copy_to(num_full * block_size_, rest, sequence.pending.data());
  } else {
    std::vector<int32_t> joined(static_cast<size_t>(total));
    std::copy(sequence.pending.begin(), sequence.pending.end(), joined.begin());
    tokens.copy_to(0, tokens.size(), joined.data() + before);
    cache_blocks(sequence, TokenView(joined.data(), num_full * block_size_));
    sequence.pending.assign(joined.end() - rest, joined.end());
  }
  return num_full;
}

// Passes the first own blocks to the tree. Where it has the same tokens already, its ids take the place of these.
void SequenceRows::cache_blocks(Sequence& sequence, const TokenView& tokens) {
  const auto num_full = static_cast<size_t>(tokens.size() / block_size_);
  const auto begin = static_cast<size_t>(sequence.match.num_blocks());
  sequence.match = tree_->insert(tokens, sequence.own_ids().first(num_full), {}, &sequence.match);
  tree_->copy_block_ids(sequence.match, static_cast<int64_t>(begin), std::span(sequence.ids).subspan(begin, num_full));
}

int64_t SequenceRows::commit_each(std::span<const int64_t> rows, const TokenView& tokens) {
  std::lock_guard lock(mutex_);
  check(tokens.size() == static_cast<int64_t>(rows.size()), "tokens must be one for each of ", rows.size(),
        " rows, got ", tokens.size());
  tokens.check_fits(0, tokens.size());
  name_all(rows);
  for (const int64_t row : rows) {
    Sequence& sequence = at(row);
    check_room(sequence, 1);
    if (shares(sequence)) sequence.pending.reserve(sequence.pending.size() + 1);
  }
  int64_t num_cached = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    Sequence& sequence = at(rows[i]);
    ++sequence.num_written;
    if (!shares(sequence)) continue;
    sequence.pending.push_back(static_cast<int32_t>(tokens.at(static_cast<int64_t>(i))));
    if (static_cast<int64_t>(sequence.pending.size()) >= block_size_) num_cached += cache_pending(sequence);
  }
  return num_cached;
}

// Without memory the tokens stay pending, for the next commit: those of other sequences are committed already.
int64_t SequenceRows::cache_pending(Sequence& sequence) {
  try {
    return cache_full_blocks(sequence);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

// Returns how many blocks of pending tokens were full.
int64_t SequenceRows::cache_full_blocks(Sequence& sequence) {
  const int64_t num_full = static_cast<int64_t>(sequence.pending.size()) / block_size_;
  if (num_full == 0) return 0;
  cache_blocks(sequence, TokenView(sequence.pending.data(), num_full * block_size_));
  sequence.pending.erase(sequence.pending.begin(), sequence.pending.begin() + num_full * block_size_);
  return num_full;
}

}  // namespace kvpage
