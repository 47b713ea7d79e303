#include "sequences/sequence_rows.h"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "base/check.h"

namespace kvpage {
namespace {

constexpr int kIndexBits = 32;

// A match that is released again unless it is taken.
class HeldMatch {
 public:
  explicit HeldMatch(Match match) : match_(std::move(match)) {}
  HeldMatch(const HeldMatch&) = delete;
  HeldMatch& operator=(const HeldMatch&) = delete;
  ~HeldMatch() {
    if (is_held_) match_.tree().release(match_);
  }
  const Match& get() const { return match_; }
  Match& get() { return match_; }
  Match take() {
    is_held_ = false;
    return std::move(match_);
  }

 private:
  Match match_;
  bool is_held_ = true;
};

}  // namespace

SequenceRows::SequenceRows(std::shared_ptr<PrefixTree> tree, bool is_caching)
    : tree_(std::move(tree)), pool_(tree_->pool()), block_size_(tree_->block_size()), is_caching_(is_caching) {}

SequenceRows::~SequenceRows() {
  for (Row& row : rows_)
    if (row.version % 2 == 1) {
      pool_->release(row.sequence.own_ids());
      tree_->release(row.sequence.match);
    }
}

int64_t SequenceRows::num_rows() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(rows_.size() - free_.size());
}

// --- rows ---

const Sequence& SequenceRows::at(int64_t row) const {
  const auto index = static_cast<uint32_t>(row), version = static_cast<uint32_t>(row >> kIndexBits);
  if (index < rows_.size() && rows_[index].version == version && version % 2 == 1) [[likely]]
    return rows_[index].sequence;
  throw UnknownRow("row " + std::to_string(row));
}

Sequence& SequenceRows::at(int64_t row) { return const_cast<Sequence&>(std::as_const(*this).at(row)); }

// The rows of one call, each named once.
void SequenceRows::name_all(std::span<const int64_t> rows) {
  const uint64_t call = ++num_calls_;
  for (const int64_t row : rows) {
    Sequence& sequence = at(row);
    check(sequence.named_by != call, "rows must be distinct, got ", row, " twice");
    sequence.named_by = call;
  }
}

// Makes sure that take_row finds a row, and that giving it back needs no memory.
void SequenceRows::reserve_row() {
  if (!free_.empty()) return;
  const size_t num_rows = rows_.size(), more = std::max<size_t>(num_rows, 8);
  free_.reserve(num_rows + more);
  rows_.resize(num_rows + more);
  for (size_t index = num_rows + more; index-- > num_rows;) free_.push_back(static_cast<uint32_t>(index));
}

int64_t SequenceRows::take_row(Sequence&& sequence) noexcept {
  const uint32_t index = free_.back();
  free_.pop_back();
  Row& row = rows_[index];
  row.sequence = std::move(sequence);
  row.version = (row.version + 1) & 0x7fffffff;
  return int64_t{row.version} << kIndexBits | index;
}

// --- a sequence's life ---

BegunSequence SequenceRows::begin(const Prompt& prompt, const HostUse& host, DueMoves* moves) {
  std::lock_guard lock(mutex_);
  const TokenView& tokens = prompt.tokens;
  check(tokens.size() > 0, "tokens must hold at least one token, got none");
  check(prompt.num_spare >= 0, "num_spare must not be negative, got ", prompt.num_spare);
  Sequence fresh;
  fresh.num_tokens = tokens.size();
  fresh.name = prompt.name;
  fresh.ids.resize(static_cast<size_t>(blocks_for(tokens.size())));
  if (is_caching_) fresh.pending.reserve(static_cast<size_t>(block_size_));
  reserve_row();
  BegunSequence begun;
  HeldMatch match(tree_->match(tokens, prompt.name, prompt.priority, prompt.num_left_over, false));
  int64_t num_on_device = match.get().num_blocks();
  if (tree_->has_host_tier()) {
    num_on_device = tree_->num_device_blocks(match.get());
    begun.num_host = match.get().num_blocks() - num_on_device;
    if (begun.num_host > 0 && begun.num_host < host.fewest_loaded) {
      tree_->trim(match.get());
      begun.num_refused = std::exchange(begun.num_host, 0);
    }
  }
  const int64_t num_taken = static_cast<int64_t>(fresh.ids.size()) - num_on_device;
  check_free(num_taken, prompt.num_spare);
  std::optional<HeldMatch> part_match;  // it pins blocks that count as spare all the same: they are read once
  int64_t num_part = 0;
  if (auto part = prompt.shares_parts ? tree_->match_part(match.get(), tokens, prompt.num_left_over) : std::nullopt) {
    part_match.emplace(std::move(part->match));
    tokens.check_fits(match.get().num_tokens(), part->num_tokens);
    if (num_taken > num_free()) {
      part_match.reset();  // it is not worth a request
    } else {
      begun.part_from = part->block_id;
      begun.is_part_on_device = part->is_on_device;
      num_part = part->num_tokens;
    }
  }
  give(&fresh, match.get(), num_on_device, prompt.is_hit, host, moves);
  begun.num_cached = fresh.num_written = match.get().num_tokens() + num_part;
  if (num_part > 0) {
    begun.part_to = fresh.ids[static_cast<size_t>(match.get().num_blocks())];
    fresh.pending.resize(static_cast<size_t>(num_part));
    tokens.copy_to(match.get().num_tokens(), num_part, fresh.pending.data());
  }
  fresh.match = match.take();
  begun.row = take_row(std::move(fresh));
  return begun;
}

int64_t SequenceRows::num_blocks_to_resume(const Match& match, const Resumption& resumption) const {
  const int64_t num_blocks = std::max<int64_t>(blocks_for(resumption.num_tokens), 0), num_left = resumption.num_left;
  check(num_left >= 0 && num_left <= num_blocks, "num_left must be in [0, ", num_blocks, "], got ", num_left);
  return std::max(num_blocks, match.num_blocks() + num_left);
}

int64_t SequenceRows::resume(Match& match, const Resumption& resumption, const HostUse& host, DueMoves* moves) {
  std::lock_guard lock(mutex_);
  const int64_t num_on_device = tree_->num_device_blocks(match), num_left = resumption.num_left;
  check(resumption.num_spare >= 0, "num_spare must not be negative, got ", resumption.num_spare);
  check(resumption.num_written >= match.num_tokens() && resumption.num_written <= resumption.num_tokens,
        "num_written must be in [", match.num_tokens(), ", ", resumption.num_tokens, "], got ", resumption.num_written);
  const auto num_blocks = static_cast<size_t>(num_blocks_to_resume(match, resumption));
  Sequence fresh;
  fresh.num_tokens = resumption.num_tokens;
  fresh.num_written = resumption.num_written;
  fresh.num_left = num_left;
  fresh.is_private = resumption.is_private;
  fresh.name = resumption.name;
  fresh.ids.reserve(num_blocks);
  fresh.ids.resize(num_blocks - static_cast<size_t>(num_left));
  if (is_caching_) fresh.pending.reserve(std::max(static_cast<size_t>(block_size_), resumption.pending.size()));
  fresh.pending.assign(resumption.pending.begin(), resumption.pending.end());
  reserve_row();
  check_free(static_cast<int64_t>(fresh.ids.size()) - num_on_device, resumption.num_spare);
  const auto own = std::span(fresh.ids).subspan(static_cast<size_t>(match.num_blocks()));
  moves->returned.reserve(std::min(own.size(), resumption.host_ids.size()));
  give(&fresh, match, num_on_device, resumption.is_hit, host, moves);
  for (size_t i = 0; i < std::min(own.size(), resumption.host_ids.size()); ++i)
    moves->returned.emplace_back(resumption.host_ids[i], own[i]);
  fresh.ids.insert(fresh.ids.begin() + match.num_blocks(), static_cast<size_t>(num_left), 0);  // there is room
  fresh.match = tree_->take(match);
  return take_row(std::move(fresh));
}

// Fills the ids, as many as the sequence has blocks: the match's, of which those on the host come back, then free ones.
void SequenceRows::give(Sequence* fresh, const Match& match, int64_t num_on_device, bool is_hit, const HostUse& host,
                        DueMoves* moves) {
  const auto num_found = static_cast<size_t>(match.num_blocks()), num_there = static_cast<size_t>(num_on_device);
  const auto taken = std::span(fresh->ids).subspan(num_there);
  const auto from_host = taken.first(num_found - num_there);
  make_room(static_cast<int64_t>(taken.size()), host, moves);
  pool_->allocate(taken);
  try {
    if (!from_host.empty()) moves->promoted = tree_->promote(match, from_host);
  } catch (...) {
    pool_->release(taken);
    throw;
  }
  if (is_hit) tree_->count_hit(match);
  try {
    if (host.keeps_evicted && host.min_hits > 0) moves->written = tree_->write_out(match, host.min_hits);
  } catch (const std::bad_alloc&) {  // they are copied when they are evicted
  }
  tree_->copy_block_ids(match, 0, std::span(fresh->ids).first(num_found));
}

int64_t SequenceRows::num_free() const { return pool_->num_free() + tree_->num_evictable(); }

void SequenceRows::check_free(int64_t num_blocks, int64_t num_spare) const {
  if (const int64_t most = num_free(); num_blocks > most - num_spare)  // the sum may be beyond 64 bits
    throw OutOfBlocks(static_cast<size_t>(num_blocks) + static_cast<size_t>(num_spare), static_cast<size_t>(most));
}

// Evicts what is needed for so many free blocks.
void SequenceRows::make_room(int64_t num_blocks, const HostUse& host, DueMoves* moves) {
  const int64_t lacking = num_blocks - pool_->num_free();
  if (lacking <= 0) return;
  check_free(num_blocks);
  if (host.keeps_evicted) {
    moves->demoted = tree_->demote(lacking).second;
  } else {
    tree_->evict(lacking);
  }
}

int64_t SequenceRows::fork(int64_t row, int64_t num_tokens) {
  std::lock_guard lock(mutex_);
  Sequence& parent = at(row);
  cache_full_blocks(parent);  // the tree takes no block that two hold
  const int64_t fewest = static_cast<int64_t>(parent.num_given()) * block_size_;
  check(num_tokens >= fewest && num_tokens <= parent.num_written, "num_tokens must be in [", fewest, ", ",
        parent.num_written, "], got ", num_tokens);
  Sequence child;
  child.name = parent.name;
  child.ids.assign(parent.ids.begin(), parent.ids.begin() + blocks_for(num_tokens));
  if (shares(parent)) {
    child.pending.reserve(static_cast<size_t>(block_size_));
    child.pending.assign(parent.pending.begin(), parent.pending.begin() + (num_tokens - parent.match.num_tokens()));
  }
  child.num_tokens = child.num_written = num_tokens;
  child.num_left = parent.num_left;
  child.is_private = parent.is_private;
  child.is_forked = true;
  reserve_row();
  HeldMatch match(tree_->pin(at(row).match));
  pool_->share(std::span(child.ids).subspan(at(row).num_given()));
  at(row).is_forked = true;
  child.match = match.take();
  return take_row(std::move(child));
}

void SequenceRows::remove(int64_t row) {
  std::lock_guard lock(mutex_);
  Sequence& sequence = at(row);
  pool_->release(sequence.own_ids());
  tree_->release(sequence.match);
  const auto index = static_cast<uint32_t>(row);
  rows_[index].sequence = Sequence();
  rows_[index].version = (rows_[index].version + 1) & 0x7fffffff;
  free_.push_back(index);
}

void SequenceRows::give_back_room(int64_t row) {
  std::lock_guard lock(mutex_);
  Sequence& sequence = at(row);
  const auto num_blocks = static_cast<size_t>(blocks_for(sequence.num_written));
  pool_->release(std::span(sequence.ids).subspan(num_blocks));
  sequence.ids.resize(num_blocks);
  sequence.num_tokens = sequence.num_written;
}

int64_t SequenceRows::release_before(int64_t row, int64_t num_tokens) {
  std::lock_guard lock(mutex_);
  Sequence& sequence = at(row);
  check(num_tokens >= 0 && num_tokens <= sequence.num_written, "num_tokens must be in [0, ", sequence.num_written,
        "] committed ones, got ", num_tokens);
  const int64_t num_more = num_tokens / block_size_ - static_cast<int64_t>(sequence.num_given());
  if (shares(sequence) || num_more <= 0) return 0;
  pool_->release(sequence.own_ids().first(static_cast<size_t>(num_more)));
  sequence.num_left += num_more;
  return num_more;
}

void SequenceRows::make_private(int64_t row) {
  std::lock_guard lock(mutex_);
  at(row).is_private = true;
  at(row).pending.clear();
}

}  // namespace kvpage
