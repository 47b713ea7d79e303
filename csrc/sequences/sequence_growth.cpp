// SequenceRows: room for more tokens, with copies of shared blocks (copy-on-write).
#include <algorithm>
#include <unordered_map>

#include "base/check.h"
#include "sequences/sequence_rows.h"

namespace kvpage {

// The blocks that an append takes.
struct SequenceRows::Growth {
  std::vector<Sequence*> copied;  // their partly filled last block is read by others, too
  int64_t num_added = 0;
  int64_t num_blocks() const { return static_cast<int64_t>(copied.size()) + num_added; }
};

SequenceRows::Growth SequenceRows::growth(std::span<const int64_t> rows, const Counts& counts) {
  check(counts.fits(rows.size()), "counts must be one for each of ", rows.size(), " rows");
  name_all(rows);
  Growth growth;
  std::unordered_map<int32_t, int64_t> holders;  // of shared last blocks: those that have no copy yet
  for (size_t i = 0; i < rows.size(); ++i) {
    Sequence& sequence = at(rows[i]);
    const int64_t count = counts.at(i), room = static_cast<int64_t>(sequence.ids.size()) * block_size_;
    check(count >= 0, "num_new_tokens must not be negative, got ", count);
    check(count <= kMaxTokens - sequence.num_tokens, "num_new_tokens must fit into ", kMaxTokens, " tokens, got ",
          count);
    if (sequence.num_tokens + count > room)
      growth.num_added = std::min(growth.num_added + blocks_for(sequence.num_tokens + count - room), kMaxTokens);
    if (!sequence.is_forked || count == 0 || sequence.num_tokens == room) continue;
    const int32_t last = sequence.ids.back();
    int64_t& left = holders.try_emplace(last, pool_->ref_count(last)).first->second;
    if (left <= 1) continue;
    growth.copied.push_back(&sequence);
    --left;
  }
  return growth;
}

int64_t SequenceRows::num_blocks_to_append(std::span<const int64_t> rows, const Counts& counts) {
  std::lock_guard lock(mutex_);
  return growth(rows, counts).num_blocks();
}

bool SequenceRows::append_if_free(std::span<const int64_t> rows, const Counts& counts) {
  std::lock_guard lock(mutex_);
  const Growth growth = this->growth(rows, counts);
  if (!growth.copied.empty() || growth.num_added > pool_->num_free()) return false;
  grow(rows, counts, growth, nullptr);
  return true;
}

void SequenceRows::append(std::span<const int64_t> rows, const Counts& counts, const HostUse& host, DueMoves* moves) {
  std::lock_guard lock(mutex_);
  const Growth growth = this->growth(rows, counts);
  check_free(growth.num_blocks());  // no memory for what cannot be
  moves->copied.reserve(growth.copied.size());
  make_room(growth.num_blocks(), host, moves);
  grow(rows, counts, growth, moves);
}

// `moves` has room for the copies.
void SequenceRows::grow(std::span<const int64_t> rows, const Counts& counts, const Growth& growth, DueMoves* moves) {
  std::vector<int32_t> fresh(static_cast<size_t>(growth.num_blocks())), old;
  old.reserve(growth.copied.size());
  for (size_t i = 0; i < rows.size() && growth.num_added > 0; ++i) reserve_ids(at(rows[i]), counts.at(i));
  pool_->allocate(fresh);
  // From here on nothing throws.
  auto next = fresh.begin();
  for (Sequence* sequence : growth.copied) {
    old.push_back(sequence->ids.back());
    moves->copied.emplace_back(sequence->ids.back(), *next);
    sequence->ids.back() = *next++;
    sequence->is_forked = false;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    Sequence& sequence = at(rows[i]);
    sequence.num_tokens += counts.at(i);
    while (static_cast<int64_t>(sequence.ids.size()) * block_size_ < sequence.num_tokens)
      sequence.ids.push_back(*next++);
  }
  pool_->release(old);
}

// Half as many more again, so that growing block by block costs little.
void SequenceRows::reserve_ids(Sequence& sequence, int64_t count) const {
  const auto needed = static_cast<size_t>(blocks_for(sequence.num_tokens + count));
  if (needed > sequence.ids.capacity()) sequence.ids.reserve(std::max(needed, needed + needed / 2));
}

}  // namespace kvpage
