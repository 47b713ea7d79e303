#include "sequence_life.h"

#include <algorithm>
#include <set>

using namespace kvpage;

namespace {

constexpr int64_t kBlockSize = 3;
constexpr size_t kMostSequences = 8;

TokenView view(const std::vector<int32_t>& tokens) { return {tokens.data(), static_cast<int64_t>(tokens.size())}; }

// Says whose K and V: of the last of the first `count` tokens.
uint64_t content(const std::vector<int32_t>& tokens, int64_t count) {
  uint64_t found = static_cast<uint64_t>(count);
  for (int64_t i = 0; i < count; ++i)
    found = (found + static_cast<uint64_t>(tokens[static_cast<size_t>(i)]) + 1) * 0x9e3779b97f4a7c15ull;
  return found;
}

}  // namespace

SequenceLife::SequenceLife(int64_t num_blocks, bool is_caching, uint64_t seed, Figures* figures)
    : Life(seed, figures),
      pool_(std::make_shared<BlockPool>(num_blocks)),
      tree_(std::make_shared<PrefixTree>(pool_, kBlockSize)),
      is_caching_(is_caching),
      rows_(std::make_unique<SequenceRows>(tree_, is_caching)),
      memory_(static_cast<size_t>(num_blocks * kBlockSize)) {}

void SequenceLife::step() {
  using Operation = void (SequenceLife::*)();
  static constexpr Operation kOperations[] = {&SequenceLife::begin,  &SequenceLife::begin,       &SequenceLife::append,
                                              &SequenceLife::append, &SequenceLife::commit_each, &SequenceLife::commit,
                                              &SequenceLife::commit, &SequenceLife::fork,        &SequenceLife::remove,
                                              &SequenceLife::remove, &SequenceLife::give_back,   &SequenceLife::look};
  (this->*kOperations[rng.below(std::size(kOperations))])();
}

// A row in use; now and then an old number, or one that never was.
int64_t SequenceLife::some_row() {
  if (!gone_.empty() && rng.chance(5)) return rng.one_of(gone_);
  if (naive_.empty() || rng.chance(1)) return static_cast<int64_t>(rng.next());
  auto found = naive_.begin();
  std::advance(found, rng.below(static_cast<int64_t>(naive_.size())));
  return found->first;
}

SequenceLife::Rows SequenceLife::some_rows() {
  Rows rows(static_cast<size_t>(rng.below(5)));
  for (int64_t& row : rows) row = some_row();
  if (rng.chance(10)) return rows;  // with repeats
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

bool SequenceLife::is_refused(const Rows& rows) {
  return std::set<int64_t>(rows.begin(), rows.end()).size() < rows.size();
}

// Whether the library has done it: it does not for a row that is not known.
template <typename Call>
bool SequenceLife::done(bool is_known, const Call& library) {
  try {
    const Outcome found = outcome(library);
    expect(is_known || found == Outcome::kRefused, "a row that is not in use was taken");
    return found == Outcome::kDone;
  } catch (const UnknownRow&) {
    expect(!is_known, "a row in use was not known");
    return false;
  }
}

// What a model writes for positions [first, last).
void SequenceLife::write(int64_t row, int64_t first, int64_t last) {
  const Naive& naive = naive_.at(row);
  const int64_t starts[] = {first}, ends[] = {last}, rows[] = {row};
  std::vector<int64_t> slots(static_cast<size_t>(rows_->check_positions(rows, starts, ends)));
  rows_->fill_slots(rows, starts, ends, slots.data());
  for (int64_t i = first; i < last; ++i)
    memory_.at(static_cast<size_t>(slots[static_cast<size_t>(i - first)])) = content(naive.tokens, i + 1);
}

void SequenceLife::copy(int64_t from, int64_t to) {
  std::copy_n(memory_.begin() + from * kBlockSize, kBlockSize, memory_.begin() + to * kBlockSize);
}

void SequenceLife::begin() {
  if (naive_.size() >= kMostSequences) return remove();
  std::vector<int32_t> tokens(static_cast<size_t>(rng.below(5 * kBlockSize)));
  for (int32_t& token : tokens) token = some_token();
  const auto size = static_cast<int64_t>(tokens.size());
  std::optional<BegunSequence> begun;
  const Outcome found = outcome(
      [&] { begun = rows_->begin(view(tokens), "space", 0, is_caching_ ? 1 : size, is_caching_ && rng.chance(70)); });
  expect((found == Outcome::kRefused) == tokens.empty(), "begin came to another end");
  if (!begun) return;
  if (begun->part_from >= 0) copy(begun->part_from, begun->part_to);
  Naive& naive = naive_[begun->row];
  naive.num_tokens = size;
  naive.tokens.assign(tokens.begin(), tokens.begin() + begun->num_cached);
  expect(begun->num_cached < size, "no token is left to compute");
}

void SequenceLife::append() {
  const Rows rows = some_rows();
  std::vector<int64_t> counts(rows.size() + 1);
  for (int64_t& count : counts)
    count = rng.chance(97) ? rng.below(5) : rng.chance(50) ? -1 : int64_t{1} << rng.below(63);
  const bool has_each = rng.chance(70);
  const Counts given = has_each ? Counts(std::span<const int64_t>(counts.data(), rows.size())) : Counts(counts.front());
  const bool is_known = std::all_of(rows.begin(), rows.end(), [&](int64_t row) { return naive_.contains(row); });
  std::vector<TierPair> copies;
  if (!done(is_known, [&] { copies = rows_->append(rows, given); })) return;
  expect(!is_refused(rows), "a row was taken twice");
  for (const auto& [from, to] : copies) copy(from, to);
  for (size_t i = 0; i < rows.size(); ++i) naive_.at(rows[i]).num_tokens += given.at(i);
}

void SequenceLife::commit() {
  const int64_t row = some_row();
  const bool is_known = naive_.contains(row);
  std::vector<int32_t> tokens(static_cast<size_t>(rng.below(2 * kBlockSize + 2)));
  for (int32_t& token : tokens) token = some_token();
  if (is_known) {
    Naive& naive = naive_.at(row);
    const auto written = static_cast<int64_t>(naive.tokens.size()), room = naive.num_tokens - written;
    if (rng.chance(95)) tokens.resize(std::min(tokens.size(), static_cast<size_t>(room)));
    if (static_cast<int64_t>(tokens.size()) <= room && !tokens.empty() && naive.num_gone <= written) {
      naive.tokens.insert(naive.tokens.end(), tokens.begin(), tokens.end());
      const int64_t last_block = (written / kBlockSize) * kBlockSize;
      // A fork that has no copy of its last block yet must not be written to: it appends first.
      const int64_t one[] = {row};
      const bool is_shared = rows_->num_forked(one) > 0 && written > last_block;
      if (is_shared) {
        naive.tokens.resize(static_cast<size_t>(written));
        return;
      }
      write(row, written, written + static_cast<int64_t>(tokens.size()));
      expect(done(true, [&] { rows_->commit(row, view(tokens)); }), "commit was refused");
      return;
    }
    expect(!done(true, [&] { rows_->commit(row, view(tokens)); }) || tokens.empty(), "commit took too many tokens");
    return;
  }
  done(false, [&] { rows_->commit(row, view(tokens)); });
}

void SequenceLife::commit_each() {
  const Rows rows = some_rows();
  bool is_known = true, has_room = true;
  for (int64_t row : rows) {
    const auto found = naive_.find(row);
    is_known &= found != naive_.end();
    if (found == naive_.end()) continue;
    const int64_t one[] = {row};
    if (rows_->num_forked(one) > 0) return;
    has_room &= static_cast<int64_t>(found->second.tokens.size()) < found->second.num_tokens;
  }
  std::vector<int32_t> tokens(rows.size() + (rng.chance(3) ? 1 : 0));
  for (int32_t& token : tokens) token = some_token();
  const bool is_right = is_known && has_room && !is_refused(rows) && tokens.size() == rows.size();
  if (is_right)
    for (size_t i = 0; i < rows.size(); ++i) {
      auto& own = naive_.at(rows[i]).tokens;
      own.push_back(tokens[i]);
      write(rows[i], static_cast<int64_t>(own.size()) - 1, static_cast<int64_t>(own.size()));
    }
  expect(done(is_known, [&] { rows_->commit_each(rows, view(tokens)); }) == is_right,
         "commit_each came to another end");
}

void SequenceLife::fork() {
  if (naive_.size() >= kMostSequences) return remove();
  const int64_t row = some_row(), num_tokens = rng.below(4 * kBlockSize);
  const bool is_known = naive_.contains(row);
  int64_t child = 0;
  if (!done(is_known, [&] { child = rows_->fork(row, num_tokens); })) return;
  const Naive parent = naive_.at(row);
  expect(num_tokens <= static_cast<int64_t>(parent.tokens.size()), "a fork has more tokens than are written");
  Naive& naive = naive_[child] = parent;
  naive.tokens.resize(static_cast<size_t>(num_tokens));
  naive.num_tokens = num_tokens;
}

void SequenceLife::remove() {
  const int64_t row = some_row();
  if (!done(naive_.contains(row), [&] { rows_->remove(row); })) return;
  naive_.erase(row);
  gone_.push_back(row);
}

void SequenceLife::give_back() {
  const int64_t row = some_row();
  const bool is_known = naive_.contains(row);
  if (rng.chance(50)) {
    if (done(is_known, [&] { rows_->give_back_room(row); })) {
      Naive& naive = naive_.at(row);
      naive.num_tokens = static_cast<int64_t>(naive.tokens.size());
    }
    return;
  }
  if (rng.chance(20) && done(is_known, [&] { rows_->make_private(row); })) naive_.at(row).is_private = true;
  const int64_t num_tokens = rng.below(4 * kBlockSize);
  int64_t num_given = 0;
  if (done(is_known, [&] { num_given = rows_->release_before(row, num_tokens); }) && num_given > 0)
    naive_.at(row).num_gone = num_tokens / kBlockSize * kBlockSize;
}

// The arguments of a step name what the sequences have.
void SequenceLife::look() {
  Rows rows = some_rows();
  std::erase_if(rows, [&](int64_t row) { return !naive_.contains(row); });
  const int64_t width = rows_->most_blocks(rows);
  std::vector<int32_t> tables(rows.size() * static_cast<size_t>(width), -1);
  rows_->fill_tables(rows, width, tables.data());
  std::vector<int64_t> slots(rows.size()), lengths(rows.size());
  const bool has_tokens = std::all_of(rows.begin(), rows.end(), [&](int64_t row) { return naive_.at(row).num_tokens; });
  const bool is_done = done(true, [&] { rows_->fill_last(rows, slots.data(), lengths.data()); });
  expect(is_done == has_tokens, "fill_last came to another end");
  for (size_t i = 0; is_done && i < rows.size(); ++i) {
    const int64_t last = naive_.at(rows[i]).num_tokens - 1;
    const int32_t id = tables[i * static_cast<size_t>(width) + static_cast<size_t>(last / kBlockSize)];
    expect(lengths[i] == last + 1 && slots[i] == id * kBlockSize + last % kBlockSize, "a last slot is another's");
  }
}

void SequenceLife::compare() {
  tree_->check_invariants(std::nullopt);
  pool_->check_invariants();
  expect(rows_->num_rows() == static_cast<int64_t>(naive_.size()), "another number of rows is in use");
  for (const auto& [row, naive] : naive_)
    rows_->look_at(row, [&](const Sequence& sequence) {
      const auto written = static_cast<int64_t>(naive.tokens.size());
      expect(sequence.num_written == written && sequence.num_tokens == naive.num_tokens,
             "a sequence is of other length");
      expect(static_cast<int64_t>(sequence.ids.size()) == (naive.num_tokens + kBlockSize - 1) / kBlockSize,
             "a sequence has another number of blocks");
      for (int64_t i = naive.num_gone; i < written; ++i) {
        const int64_t slot = sequence.ids[static_cast<size_t>(i / kBlockSize)] * kBlockSize + i % kBlockSize;
        expect(memory_.at(static_cast<size_t>(slot)) == content(naive.tokens, i + 1), "position ", i, " is another's");
      }
    });
}

// Half of them by hand, the others by the rows' own end.
void SequenceLife::end() {
  while (naive_.size() > kMostSequences / 2) {
    rows_->remove(naive_.begin()->first);
    naive_.erase(naive_.begin());
  }
  rows_.reset();
  expect(tree_->num_matches() == 0, "matches are lost");
  tree_->check_invariants(std::span<const int32_t>());
  tree_->clear();
  expect(pool_->num_free() == pool_->num_blocks(), "blocks are lost");
}
