#include "slot_pool_life.h"

#include <algorithm>
#include <tuple>

SlotPoolLife::SlotPoolLife(int64_t num_slots, uint64_t seed, Figures* figures)
    : Life(seed, figures), pool_(num_slots), naive_(static_cast<size_t>(num_slots)) {
  for (int64_t slot = num_slots; slot-- > 0;) free_.push_back(slot);
}

void SlotPoolLife::step() {
  using Operation = void (SlotPoolLife::*)();
  static constexpr Operation kOperations[] = {&SlotPoolLife::allocate, &SlotPoolLife::allocate, &SlotPoolLife::occupy,
                                              &SlotPoolLife::share,    &SlotPoolLife::release,  &SlotPoolLife::release,
                                              &SlotPoolLife::rank,     &SlotPoolLife::rank,     &SlotPoolLife::unrank,
                                              &SlotPoolLife::victim,   &SlotPoolLife::victim};
  (this->*kOperations[rng.below(std::size(kOperations))])();
}

int64_t SlotPoolLife::some_slot() {
  const int64_t num_slots = pool_.num_slots();
  return rng.chance(98) && num_slots > 0 ? rng.below(num_slots) : rng.below(num_slots + 2) - 1;
}

int64_t SlotPoolLife::num_references(int64_t slot) const {
  return slot >= 0 && slot < pool_.num_slots() ? naive_[slot].count : 0;
}

void SlotPoolLife::allocate() {
  int64_t slot = -1;
  const Outcome found = outcome([&] { slot = pool_.allocate(); });
  expect(found == (free_.empty() ? Outcome::kOutOfBlocks : Outcome::kDone), "allocate came to another end");
  if (free_.empty()) return;
  expect(slot == free_.back(), "allocate gave slot ", slot, ", not ", free_.back());
  free_.pop_back();
  naive_[slot].count = 1;
}

void SlotPoolLife::occupy() {
  const int64_t slot = some_slot();
  const auto at = std::find(free_.begin(), free_.end(), slot);
  const bool can = at != free_.end();
  expect((outcome([&] { pool_.occupy(slot); }) == Outcome::kDone) == can, "occupy came to another end");
  if (!can) return;
  free_.erase(at);
  naive_[slot].count = 1;
}

void SlotPoolLife::share() {
  const int64_t slot = some_slot();
  const bool can = num_references(slot) > 0;
  expect((outcome([&] { pool_.share(slot); }) == Outcome::kDone) == can, "share came to another end");
  if (can) ++naive_[slot].count;
}

void SlotPoolLife::release() {
  const int64_t slot = some_slot();
  const bool can = num_references(slot) > (has_rank(slot) ? 1 : 0);
  expect((outcome([&] { pool_.release(slot); }) == Outcome::kDone) == can, "release came to another end");
  if (can && --naive_[slot].count == 0) free_.push_back(slot);
}

void SlotPoolLife::rank() {
  const int64_t slot = some_slot(), rank = rng.below(9) - 4;
  const bool can = num_references(slot) > 0;
  expect((outcome([&] { pool_.rank(slot, rank); }) == Outcome::kDone) == can, "rank came to another end");
  if (can) naive_[slot].rank = rank;
}

void SlotPoolLife::unrank() {
  const int64_t slot = some_slot();
  const bool can = has_rank(slot);
  expect((outcome([&] { pool_.unrank(slot); }) == Outcome::kDone) == can, "unrank came to another end");
  if (can) naive_[slot].rank.reset();
}

void SlotPoolLife::victim() {
  const int64_t num_slots = pool_.num_slots(), besides = rng.below(num_slots + 1) - 1;
  kept_.clear();
  for (int64_t slot = 0; slot < num_slots && rng.chance(80); ++slot) kept_.push_back(slot);
  if (rng.chance(50)) kept_.clear();
  const auto is_kept = [&](int64_t slot) { return std::find(kept_.begin(), kept_.end(), slot) != kept_.end(); };
  std::optional<std::tuple<bool, int64_t, int64_t>> first;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (slot == besides || naive_[slot].count != 1 || !naive_[slot].rank) continue;
    const auto order = std::tuple(is_kept(slot), *naive_[slot].rank, slot);
    if (!first || order < *first) first = order;
  }
  const int64_t found = call([&] { return pool_.victim(besides, kept_); });
  expect(found == (first ? std::get<2>(*first) : -1), "slot ", found, " is to be evicted first");
}

void SlotPoolLife::compare() {
  std::vector<int64_t> owned;
  for (int64_t slot = 0; slot < pool_.num_slots(); ++slot) {
    expect(pool_.ref_count(slot) == naive_[slot].count, "slot ", slot, " has another number of references");
    for (int64_t i = 0; i < naive_[slot].count; ++i) owned.push_back(slot);
  }
  pool_.check_invariants(owned);
  expect(pool_.num_free() == static_cast<int64_t>(free_.size()), "another number of slots is free");
  const auto num_ranked = std::count_if(naive_.begin(), naive_.end(), [](const auto& one) { return one.rank; });
  expect(pool_.num_ranked() == num_ranked, "another number of slots has a rank");
}

void SlotPoolLife::end() {
  for (int64_t slot = 0; slot < pool_.num_slots(); ++slot) {
    if (has_rank(slot)) pool_.unrank(slot);
    for (; naive_[slot].count > 0; --naive_[slot].count) pool_.release(slot);
  }
  expect(pool_.num_free() == pool_.num_slots(), "slots are lost");
}
