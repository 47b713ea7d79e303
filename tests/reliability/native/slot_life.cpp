#include "slot_life.h"

#include <algorithm>
#include <string_view>

using kvpage::SlotMatch;
using kvpage::TokenView;

namespace {

constexpr size_t kMostPins = 5;

TokenView view(const std::vector<int64_t>& tokens) { return {tokens.data(), static_cast<int64_t>(tokens.size())}; }

}  // namespace

SlotLife::SlotLife(const SlotWorld& world, uint64_t seed, Figures* figures)
    : Life(seed, figures),
      world_(world),
      allocator_(world.max_slots),
      tree_(world.max_capacity),
      naive_(world.max_capacity),
      is_free_(static_cast<size_t>(world.max_slots), true),
      versions_(is_free_.size()) {}

void SlotLife::step() {
  using Operation = void (SlotLife::*)();
  static constexpr Operation kOperations[] = {
      &SlotLife::insert,   &SlotLife::insert, &SlotLife::insert,  &SlotLife::find,    &SlotLife::find,
      &SlotLife::pin,      &SlotLife::pin,    &SlotLife::release, &SlotLife::release, &SlotLife::release,
      &SlotLife::withdraw, &SlotLife::alloc,  &SlotLife::alloc,   &SlotLife::free,    &SlotLife::occupy};
  (this->*kOperations[rng.below(std::size(kOperations))])();
}

SlotLife::Tokens SlotLife::tokens() {
  Tokens made(static_cast<size_t>(rng.below(world_.max_tokens + 1)));
  for (int64_t& token : made) token = rng.chance(70) ? 0 : rng.below(world_.num_symbols) - 1;
  return made;
}

// --- the tree ---

void SlotLife::insert() {
  Tokens wanted = tokens();
  if (!wanted.empty() && rng.chance(2)) wanted.back() += int64_t{1} << 33;
  const int64_t slot = rng.below(world_.max_slots + 1) - (rng.chance(98) ? 0 : world_.max_slots + 1);
  const int64_t version = rng.chance(90) && slot >= 0 && slot < world_.max_slots ? versions_[slot] : rng.below(9);
  const bool fits = std::all_of(wanted.begin(), wanted.end(), [](int64_t t) { return t == static_cast<int32_t>(t); });
  const bool can = !wanted.empty() && fits && slot >= 0;
  int64_t num_over = 0;
  const Outcome came_to = outcome([&] { num_over = tree_.insert(view(wanted), slot, version); });
  expect((came_to == Outcome::kDone) == can, "insert came to another end");
  if (!can) return;
  expect(num_over == naive_.insert(wanted, slot, version), "insert is over by another number");
  pins_.push_back(wanted);
  while (pins_.size() > kMostPins) release();
}

void SlotLife::compare_match(const SlotMatch& match, const Tokens& tokens, int64_t num_expected) {
  expect(match.num_tokens == num_expected, "a prefix of ", match.num_tokens, " tokens was found, not ", num_expected);
  const Tokens prefix(tokens.begin(), tokens.begin() + num_expected);
  if (num_expected > 0)
    expect(naive_.is_held_by(match.slot, match.version, prefix), "slot ", match.slot, " does not hold the prefix");
}

// A search with an allocator withdraws the stale slots that it meets, and need not meet them all: the others are
// withdrawn here, so that both are of one mind again.
void SlotLife::withdraw_stale() {
  for (int64_t slot = 0; slot < world_.max_slots; ++slot) {
    const auto holder = naive_.held.find(slot);
    if (holder == naive_.held.end() || holder->second.version == versions_[slot]) continue;
    call([&] { return tree_.withdraw(slot); });
    naive_.withdraw(slot);
  }
}

void SlotLife::find() {
  const Tokens wanted = tokens();
  const bool is_checked = rng.chance(50) && !naive_.held.contains(world_.max_slots);
  if (is_checked) {
    const SlotMatch match = call([&] { return tree_.find(view(wanted), &allocator_); });
    expect(match.num_tokens == 0 || match.version == versions_[match.slot], "a stale slot was found");
    withdraw_stale();
  }
  const SlotMatch match = call([&] { return tree_.find(view(wanted), is_checked ? &allocator_ : nullptr); });
  compare_match(match, wanted, naive_.find(wanted));
}

void SlotLife::pin() {
  const Tokens wanted = tokens();
  const SlotMatch match = call([&] { return tree_.pin(view(wanted), nullptr); });
  compare_match(match, wanted, naive_.pin(wanted));
  if (match.num_tokens == 0) return;
  pins_.emplace_back(wanted.begin(), wanted.begin() + match.num_tokens);
  while (pins_.size() > kMostPins) release();
}

void SlotLife::release() {
  const bool is_mine = !pins_.empty() && rng.chance(90);
  const auto at = is_mine ? pins_.begin() + rng.below(static_cast<int64_t>(pins_.size())) : pins_.end();
  const Tokens wanted = is_mine ? *at : tokens();
  const bool can = naive_.can_release(wanted);
  const Outcome came_to = outcome([&] { tree_.release(view(wanted)); });
  expect((came_to == Outcome::kDone) == can, "release came to another end");
  if (!can) return;
  naive_.release(wanted);
  const auto mine = std::find(pins_.begin(), pins_.end(), wanted);
  if (mine != pins_.end()) pins_.erase(mine);
}

void SlotLife::withdraw() {
  const int64_t slot = rng.below(world_.max_slots + 2);
  expect(call([&] { return tree_.withdraw(slot); }) == naive_.withdraw(slot), "withdraw said something else");
}

// --- the allocator ---

void SlotLife::alloc() {
  const int64_t slot = call([&] { return allocator_.alloc(); });
  const auto lowest = std::find(is_free_.begin(), is_free_.end(), true);
  expect(slot == (lowest == is_free_.end() ? -1 : lowest - is_free_.begin()), "alloc gave slot ", slot);
  if (slot < 0) return;
  is_free_[slot] = false;
  expect(allocator_.version(slot) == ++versions_[slot], "alloc gave another version");
}

void SlotLife::free() {
  const int64_t slot = rng.below(world_.max_slots + 2) - 1;
  const bool can = slot >= 0 && slot < world_.max_slots && !is_free_[slot];
  expect((outcome([&] { allocator_.free(slot); }) == Outcome::kDone) == can, "free came to another end");
  if (can) is_free_[slot] = true;
}

void SlotLife::occupy() {
  const int64_t slot = rng.below(world_.max_slots + 2) - 1;
  const bool can = slot >= 0 && slot < world_.max_slots && is_free_[slot];
  expect((outcome([&] { allocator_.occupy(slot); }) == Outcome::kDone) == can, "occupy came to another end");
  if (can) is_free_[slot] = false;
}

// --- comparing ---

// An edge that stays split for lack of memory is no fault; it is looked for last.
void SlotLife::compare() {
  try {
    tree_.check_invariants();
  } catch (const std::runtime_error& error) {
    if (std::string_view(error.what()).find("split for nothing") == std::string_view::npos ||
        Allocations::of_this_thread().first_failing == 0)
      throw;
    Allocations::of_this_thread().has_failed = true;  // what is evicted first may be another edge from here on
  }
  expect(tree_.num_tokens() == naive_.num_tokens(), "there are ", tree_.num_tokens(), " tokens, not ",
         naive_.num_tokens());
  expect(tree_.num_over() == naive_.num_over(), "another number of tokens is over");
  expect(tree_.num_slots() == static_cast<int64_t>(naive_.held.size()), "another number of slots holds something");
  expect(tree_.num_pins() == naive_.num_pins, "there is another number of pins");
  expect(allocator_.free_count() == std::count(is_free_.begin(), is_free_.end(), true),
         "another number of slots is free");
  for (int64_t slot = 0; slot < world_.max_slots; ++slot)
    expect(allocator_.is_free(slot) == is_free_[slot] && allocator_.version(slot) == versions_[slot], "slot ", slot,
           " is another");
}

void SlotLife::end() {
  for (const Tokens& pin : pins_) tree_.release(view(pin));
  pins_.clear();
  for (int64_t slot = 0; slot <= world_.max_slots + 1; ++slot) tree_.withdraw(slot);
  tree_.check_invariants();
  expect(tree_.num_tokens() == 0 && tree_.num_nodes() == 0 && tree_.num_pins() == 0,
         "an empty tree has tokens or pins");
}
