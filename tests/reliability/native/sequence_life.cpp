#include "sequence_life.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

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
      host_pool_(seed / 4 % 2 ? std::make_shared<BlockPool>(num_blocks / 2) : nullptr),
      tree_(std::make_shared<PrefixTree>(pool_, kBlockSize, host_pool_)),
      is_caching_(is_caching),
      rows_(std::make_unique<SequenceRows>(tree_, is_caching)),
      memory_(static_cast<size_t>(num_blocks * kBlockSize)),
      host_memory_(memory_.size()) {}

void SequenceLife::step() {
  using Operation = void (SequenceLife::*)();
  static constexpr Operation kOperations[] = {&SequenceLife::begin,  &SequenceLife::begin,       &SequenceLife::append,
                                              &SequenceLife::append, &SequenceLife::commit_each, &SequenceLife::commit,
                                              &SequenceLife::commit, &SequenceLife::fork,        &SequenceLife::remove,
                                              &SequenceLife::remove, &SequenceLife::give_back,   &SequenceLife::look,
                                              &SequenceLife::resume};
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

SequenceLife::Tokens SequenceLife::some_tokens(int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = some_token();
  return tokens;
}

std::vector<int32_t> SequenceLife::ids(int64_t row) const {
  return rows_->look_at(row, [](const Sequence& sequence) { return sequence.ids; });
}

// Tokens that there is room for and that are not written.
int64_t SequenceLife::room(int64_t row) const {
  const Naive& naive = naive_.at(row);
  return naive.num_tokens - static_cast<int64_t>(naive.tokens.size());
}

// Sequences that hold a reference to a block.
int64_t SequenceLife::num_holders(int32_t id) const {
  return std::accumulate(naive_.begin(), naive_.end(), int64_t{0}, [&](int64_t sum, const auto& each) {
    return sum + rows_->look_at(each.first, [&](const Sequence& sequence) {
      const auto own = sequence.own_ids();
      return std::count(own.begin(), own.end(), id);
    });
  });
}

bool SequenceLife::is_shared(int64_t row, int64_t position) const {
  return num_holders(ids(row)[static_cast<size_t>(position / kBlockSize)]) > 1;
}

// What a model writes for the next tokens of a sequence.
void SequenceLife::write(int64_t row, const Tokens& tokens) {
  Tokens all = naive_.at(row).tokens;
  const auto first = static_cast<int64_t>(all.size());
  all.insert(all.end(), tokens.begin(), tokens.end());
  const int64_t starts[] = {first}, ends[] = {static_cast<int64_t>(all.size())}, rows[] = {row};
  std::vector<int64_t> slots(static_cast<size_t>(rows_->check_positions(rows, starts, ends)));
  rows_->fill_slots(rows, starts, ends, slots.data());
  for (int64_t i = first; i < ends[0]; ++i)
    memory_.at(static_cast<size_t>(slots[static_cast<size_t>(i - first)])) = content(all, i + 1);
}

void SequenceLife::copy(const Memory& source, int64_t from, int64_t to, Memory* destination) {
  std::copy_n(source.begin() + from * kBlockSize, kBlockSize, destination->begin() + to * kBlockSize);
}

HostUse SequenceLife::host_use() {
  return {host_pool_ && rng.chance(90), rng.chance(80) ? 0 : int64_t{1} << 40, rng.chance(50) ? 0 : rng.below(3)};
}

// Does the moves in their order.
void SequenceLife::make(const DueMoves& moves) {
  for (const auto& [from, to] : moves.demoted) copy(memory_, from, to, &host_memory_);
  for (const auto& [from, to] : moves.promoted) copy(host_memory_, from, to, &memory_);
  for (const auto& [from, to] : moves.written) copy(memory_, from, to, &host_memory_);
  for (const auto& [from, to] : moves.returned) copy(host_memory_, from, to, &memory_);
  for (const auto& [from, to] : moves.copied) copy(memory_, from, to, &memory_);
}

// Blocks that are free, or can be evicted.
int64_t SequenceLife::num_room() const { return pool_->num_free() + tree_->num_evictable(); }

// Mostly none; now and then more than there are, as many as a number can say, or a wrong number.
int64_t SequenceLife::some_spare() {
  if (rng.chance(50)) return 0;
  if (rng.chance(90)) return rng.below(pool_->num_blocks() + 2);
  return rng.chance(50) ? std::numeric_limits<int64_t>::max() - rng.below(2) : -1 - rng.below(2);
}

// A sequence has begun where its blocks and the spare ones fit, and nowhere else; the spare ones are left.
void SequenceLife::expect_spare(Outcome found, int64_t num_taken, int64_t num_spare, int64_t num_room) {
  expect((found == Outcome::kRefused) == (num_spare < 0), "a number of spare blocks came to another end");
  const bool fits = num_spare <= num_room - num_taken;
  if (found == Outcome::kDone) expect(fits && this->num_room() >= num_spare, "the spare blocks are not left");
  if (found == Outcome::kOutOfBlocks) expect(!fits, "it did not take the room that there is");
}

void SequenceLife::begin() {
  if (naive_.size() >= kMostSequences) return remove();
  const Tokens tokens = some_tokens(rng.below(5 * kBlockSize));
  const auto size = static_cast<int64_t>(tokens.size()), num_left_over = is_caching_ ? 1 : size;
  const int64_t most = num_room();
  const bool shares_parts = is_caching_ && rng.chance(70);
  std::optional<BegunSequence> begun;
  DueMoves moves;
  const Prompt prompt{view(tokens), "space", 0, num_left_over, shares_parts, some_spare()};
  const Outcome found = outcome([&] { begun = rows_->begin(prompt, host_use(), &moves); });
  make(moves);
  expect((found == Outcome::kRefused) == (tokens.empty() || prompt.num_spare < 0), "begin came to another end");
  if (found == Outcome::kOutOfBlocks)
    expect((size + kBlockSize - 1) / kBlockSize > most - prompt.num_spare, "begin did not take the room that there is");
  if (begun) expect(prompt.num_spare <= num_room(), "begin did not leave the spare blocks");
  if (!begun) return;
  if (begun->part_from >= 0)
    copy(begun->is_part_on_device ? memory_ : host_memory_, begun->part_from, begun->part_to, &memory_);
  Naive& naive = naive_[begun->row];
  naive.num_tokens = size;
  naive.tokens.assign(tokens.begin(), tokens.begin() + begun->num_cached);
  expect(begun->num_cached + num_left_over <= size, "too few tokens are left to compute");
}

// As a sequence comes back from the host. Now and then its own last block is there, too.
void SequenceLife::resume() {
  if (naive_.size() >= kMostSequences) return remove();
  const Tokens tokens = some_tokens(1 + rng.below(4 * kBlockSize));
  const auto size = static_cast<int64_t>(tokens.size());
  Match match = call([&] { return tree_->match(view(tokens), "space", 0, is_caching_ ? 1 : size); });
  Resumption resumption{.num_tokens = size, .num_written = match.num_tokens(), .name = "space"};
  std::vector<int32_t> host_ids(host_pool_ && rng.chance(50) ? 1 : 0);
  if (!host_ids.empty() && outcome([&] { host_pool_->allocate(host_ids); }) != Outcome::kDone) host_ids.clear();
  Tokens written(tokens.begin(), tokens.begin() + match.num_tokens());
  while (!host_ids.empty() && static_cast<int64_t>(written.size()) < std::min(size, match.num_tokens() + kBlockSize)) {
    written.push_back(tokens[written.size()]);
    const auto slot = static_cast<size_t>(host_ids[0] * kBlockSize) + (written.size() - 1) % kBlockSize;
    host_memory_.at(slot) = content(tokens, static_cast<int64_t>(written.size()));
  }
  resumption.num_written = static_cast<int64_t>(written.size());
  if (is_caching_)
    resumption.pending = std::span(tokens).subspan(match.num_tokens(), written.size() - match.num_tokens());
  resumption.host_ids = host_ids;
  resumption.num_spare = some_spare();
  const int64_t num_taken = rows_->num_blocks_to_resume(match, resumption) - tree_->num_device_blocks(match);
  const int64_t num_room = this->num_room();
  DueMoves moves;
  int64_t row = 0;
  const Outcome found = outcome([&] { row = rows_->resume(match, resumption, host_use(), &moves); });
  make(moves);
  expect_spare(found, num_taken, resumption.num_spare, num_room);
  if (!host_ids.empty()) host_pool_->release(host_ids);
  expect(tree_->is_released(match) == (found == Outcome::kDone), "a match is held that was given away, or the reverse");
  if (found != Outcome::kDone) return tree_->release(match);
  naive_[row] = {std::move(written), size};
}

void SequenceLife::append() {
  const Rows rows = some_rows();
  std::vector<int64_t> counts(rows.size() + 1);
  for (int64_t& count : counts)
    count = rng.chance(97) ? rng.below(5) : rng.chance(50) ? -1 : int64_t{1} << rng.below(63);
  const bool has_each = rng.chance(70);
  const Counts given = has_each ? Counts(std::span<const int64_t>(counts.data(), rows.size())) : Counts(counts.front());
  const bool is_known = std::all_of(rows.begin(), rows.end(), [&](int64_t row) { return naive_.contains(row); });
  const int64_t num_free = pool_->num_free(), num_room = num_free + tree_->num_evictable();
  int64_t num_needed = 0;
  DueMoves moves;
  if (!done(is_known, [&] { num_needed = rows_->num_blocks_to_append(rows, given); })) {
    expect(!done(is_known, [&] { rows_->append(rows, given, host_use(), &moves); }),
           "a count was refused, and then taken");
    return;
  }
  bool is_taken = false;
  if (rng.chance(50)) done(is_known, [&] { is_taken = rows_->append_if_free(rows, given); });
  const bool is_done = is_taken || done(is_known, [&] { rows_->append(rows, given, host_use(), &moves); });
  make(moves);
  expect(!is_refused(rows), "a row was taken twice");
  expect(is_done == (num_needed <= num_room), "append did not take the room that there is");
  expect(!is_taken || num_needed <= num_free, "append has evicted something for what is free");
  if (!is_done) return;
  expect(num_room - pool_->num_free() - tree_->num_evictable() == num_needed, "append took another number of blocks");
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t first = std::exchange(naive_.at(rows[i]).num_tokens, naive_.at(rows[i]).num_tokens + given.at(i));
    expect(given.at(i) == 0 || !is_shared(rows[i], first), "new room is in a block of two sequences");
  }
}

void SequenceLife::commit() {
  const int64_t row = some_row();
  const bool is_known = naive_.contains(row);
  Tokens tokens = some_tokens(rng.below(2 * kBlockSize + 2));
  if (is_known && rng.chance(95)) tokens.resize(std::min(tokens.size(), static_cast<size_t>(room(row))));
  const bool fits = is_known && static_cast<int64_t>(tokens.size()) <= room(row);
  if (fits && !tokens.empty()) {
    if (is_shared(row, static_cast<int64_t>(naive_.at(row).tokens.size()))) return;  // it appends first
    write(row, tokens);
  }
  expect(done(is_known, [&] { rows_->commit(row, view(tokens)); }) == fits, "commit came to another end");
  if (fits) naive_.at(row).tokens.insert(naive_.at(row).tokens.end(), tokens.begin(), tokens.end());
}

void SequenceLife::commit_each() {
  const Rows rows = some_rows();
  const bool is_known = std::all_of(rows.begin(), rows.end(), [&](int64_t row) { return naive_.contains(row); });
  const Tokens tokens = some_tokens(static_cast<int64_t>(rows.size()) + (rng.chance(3) ? 1 : 0));
  const bool fits = is_known && !is_refused(rows) && tokens.size() == rows.size() &&
                    std::all_of(rows.begin(), rows.end(), [&](int64_t row) { return room(row) > 0; });
  if (fits) {
    for (const int64_t row : rows)
      if (is_shared(row, static_cast<int64_t>(naive_.at(row).tokens.size()))) return;  // it appends first
    for (size_t i = 0; i < rows.size(); ++i) write(rows[i], {tokens[i]});
  }
  expect(done(is_known, [&] { rows_->commit_each(rows, view(tokens)); }) == fits, "commit_each came to another end");
  for (size_t i = 0; fits && i < rows.size(); ++i) naive_.at(rows[i]).tokens.push_back(tokens[i]);
}

void SequenceLife::fork() {
  if (naive_.size() >= kMostSequences) return remove();
  const int64_t row = some_row(), num_tokens = rng.below(4 * kBlockSize);
  const bool is_known = naive_.contains(row);
  int64_t child = 0;
  if (!done(is_known, [&] { child = rows_->fork(row, num_tokens); })) return;
  const Naive parent = naive_.at(row);
  expect(num_tokens <= static_cast<int64_t>(parent.tokens.size()), "a fork has more tokens than are written");
  expect(num_tokens >= parent.num_gone, "a fork ends before what was given back");
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
  if (!done(is_known, [&] { num_given = rows_->release_before(row, num_tokens); })) return;
  Naive& naive = naive_.at(row);
  expect(num_tokens <= static_cast<int64_t>(naive.tokens.size()), "room was given back as if it were written");
  if (is_caching_ && !naive.is_private) return expect(num_given == 0, "what others find was given back");
  const int64_t num_gone = num_tokens / kBlockSize * kBlockSize, num_cached = (num_gone - naive.num_gone) / kBlockSize;
  expect(num_given <= std::max<int64_t>(num_cached, 0), "too much was given back");
  if (num_given > 0) naive.num_gone = num_gone;
}

// The arguments of a step name what the sequences have.
void SequenceLife::look() {
  Rows rows = some_rows();
  std::erase_if(rows, [&](int64_t row) { return !naive_.contains(row); });
  const int64_t width = rows_->most_blocks(rows);
  std::vector<int32_t> tables(rows.size() * static_cast<size_t>(width), -1);
  rows_->fill_tables(rows, width, tables.data());
  std::vector<int64_t> slots(rows.size()), lengths(rows.size());
  const bool has_tokens = std::all_of(rows.begin(), rows.end(),
                                      [&](int64_t row) { return naive_.at(row).num_tokens > naive_.at(row).num_gone; });
  const bool is_done = done(true, [&] { rows_->fill_last(rows, slots.data(), lengths.data()); });
  expect(is_done == has_tokens, "fill_last came to another end");
  for (size_t i = 0; is_done && i < rows.size(); ++i) {
    const int64_t last = naive_.at(rows[i]).num_tokens - 1;
    const int32_t id = tables[i * static_cast<size_t>(width) + static_cast<size_t>(last / kBlockSize)];
    expect(lengths[i] == last + 1 && slots[i] == id * kBlockSize + last % kBlockSize, "a last slot is another's");
  }
}

void SequenceLife::compare() {
  expect(rows_->num_rows() == static_cast<int64_t>(naive_.size()), "another number of rows is in use");
  std::vector<int32_t> held;
  for (const auto& [row, naive] : naive_) {
    compare_one(row, naive);
    rows_->look_at(row, [&](const Sequence& sequence) {
      held.insert(held.end(), sequence.own_ids().begin(), sequence.own_ids().end());
    });
  }
  tree_->check_invariants(held);
  pool_->check_invariants();
}

void SequenceLife::compare_one(int64_t row, const Naive& naive) const {
  const auto written = static_cast<int64_t>(naive.tokens.size());
  rows_->look_at(row, [&](const Sequence& sequence) {
    expect(sequence.num_written == written && sequence.num_tokens == naive.num_tokens, "a sequence is of other length");
    expect(static_cast<int64_t>(sequence.ids.size()) == (naive.num_tokens + kBlockSize - 1) / kBlockSize,
           "a sequence has another number of blocks");
    expect(sequence.is_private == naive.is_private, "a sequence became private, or public");
    const Tokens pending(naive.tokens.begin() + sequence.match.num_tokens(), naive.tokens.end());
    const bool shares = is_caching_ && !naive.is_private;
    expect(shares ? sequence.pending == pending : sequence.pending.empty(), "other tokens are pending");
    expect(naive.num_gone == 0 || static_cast<int64_t>(sequence.num_given()) * kBlockSize == naive.num_gone,
           "another number of blocks is given back");
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

// A block that was not cached for want of memory is cached later, whatever comes between.
void SequenceLife::end_without_model() {
  for (int i = 0; i < 100; ++i) step();
  compare();
  end();
}
