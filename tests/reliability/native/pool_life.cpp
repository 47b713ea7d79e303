#include "pool_life.h"

#include <algorithm>

namespace {

constexpr int64_t kMostIds = 6;

}  // namespace

PoolLife::PoolLife(int64_t num_blocks, uint64_t seed, Figures* figures)
    : Life(seed, figures), pool_(num_blocks), naive_(num_blocks) {}

void PoolLife::step() {
  using Operation = void (PoolLife::*)();
  static constexpr Operation kOperations[] = {&PoolLife::allocate, &PoolLife::allocate, &PoolLife::share,
                                              &PoolLife::release,  &PoolLife::release,  &PoolLife::release,
                                              &PoolLife::release,  &PoolLife::adopt,    &PoolLife::adopt_free,
                                              &PoolLife::drop,     &PoolLife::drop};
  (this->*kOperations[rng.below(std::size(kOperations))])();
}

int64_t PoolLife::some_id() {
  const int64_t num_blocks = pool_.num_blocks();
  return rng.chance(99) && num_blocks > 0 ? rng.below(num_blocks) : rng.below(num_blocks + 9) - 4;
}

// Distinct ids of blocks in use, as many as a few tries find; seldom anything.
const Ids& PoolLife::some_ids(bool is_cached) {
  ids_.clear();
  const bool is_any = rng.chance(1);
  for (int64_t tries = rng.below(kMostIds); tries > 0; --tries) {
    const int64_t id = some_id();
    const bool fits = is_cached ? naive_.exists(id) && naive_.cached[id] : naive_.num_owned(id) > 0;
    if (is_any || (fits && std::find(ids_.begin(), ids_.end(), id) == ids_.end()))
      ids_.push_back(static_cast<int32_t>(id));
  }
  return ids_;
}

void PoolLife::allocate() {
  const auto num_free = static_cast<int64_t>(naive_.free.size());
  const int64_t wanted = rng.below(2 * kMostIds), count = rng.chance(98) ? std::min(wanted, num_free) : wanted;
  ids_.assign(static_cast<size_t>(count), -1);
  const Outcome found = outcome([&] { pool_.allocate(ids_); });
  expect(found == (count <= num_free ? Outcome::kDone : Outcome::kOutOfBlocks), "allocate came to another end");
  if (count <= num_free) expect(ids_ == naive_.allocate(count), "allocate gave other blocks");
}

void PoolLife::share() {
  const bool can = naive_.can_share(some_ids(false));
  expect((outcome([&] { pool_.share(ids_); }) == Outcome::kDone) == can, "share came to another end");
  if (can) naive_.share(ids_);
}

void PoolLife::release() {
  some_ids(false);
  if (!ids_.empty() && rng.chance(2)) ids_.push_back(ids_.front());
  const bool can = naive_.can_release(ids_);
  expect((outcome([&] { pool_.release(ids_); }) == Outcome::kDone) == can, "release came to another end");
  if (can) naive_.release(ids_);
}

void PoolLife::adopt() {
  some_ids(false);
  if (rng.chance(95)) std::erase_if(ids_, [&](int32_t id) { return naive_.num_owned(id) != 1; });
  surplus_.clear();
  for (size_t num_surplus = ids_.size() / 3; surplus_.size() < num_surplus; ids_.pop_back())
    surplus_.push_back(ids_.back());
  const bool can = naive_.can_adopt(ids_, surplus_);
  expect((outcome([&] { pool_.adopt(ids_, surplus_); }) == Outcome::kDone) == can, "adopt came to another end");
  if (can) naive_.adopt(ids_, surplus_);
}

void PoolLife::adopt_free() {
  ids_.assign(static_cast<size_t>(rng.below(3)), -1);
  const auto num_free = static_cast<int64_t>(naive_.free.size());
  const int64_t count = pool_.adopt_free(ids_);
  expect(count == std::min(num_free, static_cast<int64_t>(ids_.size())), "adopt_free gave another number");
  for (int64_t i = 0; i < count; ++i) expect(ids_[i] == naive_.allocate(1)[0], "adopt_free gave another block");
  naive_.adopt(Ids(ids_.begin(), ids_.begin() + count), {});
}

void PoolLife::drop() {
  if (!naive_.cached.empty() && rng.chance(90)) some_ids(true);
  std::erase_if(ids_, [&](int32_t id) { return !naive_.exists(id) || !naive_.cached[id]; });
  std::sort(ids_.begin(), ids_.end());
  ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
  pool_.drop(ids_);
  for (size_t i = ids_.size(); i-- > 0;) naive_.drop(ids_[i]);
}

void PoolLife::compare() {
  pool_.check_invariants();
  expect(pool_.num_free() == static_cast<int64_t>(naive_.free.size()), "another number of blocks is free");
  for (int64_t id = 0; id < pool_.num_blocks(); ++id)
    expect(pool_.ref_count(id) == naive_.counts[id], "block ", id, " has ", pool_.ref_count(id), " references");
}

void PoolLife::end() {
  for (int32_t id = 0; id < pool_.num_blocks(); ++id) {
    if (naive_.cached[id]) pool_.drop({&id, 1});
    for (int64_t left = naive_.num_owned(id); left > 0; --left) pool_.release({&id, 1});
  }
  expect(pool_.num_free() == pool_.num_blocks(), "blocks are lost");
}
