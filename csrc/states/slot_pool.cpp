#include "states/slot_pool.h"

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>

#include "base/check.h"

namespace kvpage {

namespace {

constexpr int64_t kMostSlots = int64_t{1} << 30;

[[noreturn]] void broken(int64_t slot, const char* how) {
  throw std::runtime_error("slot " + std::to_string(slot) + " " + how);
}

}  // namespace

SlotPool::SlotPool(int64_t num_slots) : num_free_(num_slots) {
  check(num_slots >= 0 && num_slots < kMostSlots, "num_slots must be between 0 and 2**30 - 1, got ", num_slots);
  slots_.resize(static_cast<size_t>(num_slots));
  free_.resize(slots_.size());
  for (int64_t i = 0; i < num_slots; ++i) free_[i] = static_cast<int32_t>(num_slots - 1 - i);
  first_leaf_ = std::bit_ceil(std::max<size_t>(slots_.size(), 1));
  firsts_.assign(2 * first_leaf_, kNoSlot);
}

int64_t SlotPool::num_free() const {
  std::lock_guard lock(mutex_);
  return num_free_;
}

int64_t SlotPool::num_ranked() const {
  std::lock_guard lock(mutex_);
  return num_ranked_;
}

std::vector<int32_t> SlotPool::free_slots() const {
  std::lock_guard lock(mutex_);
  return {free_.begin(), free_.begin() + num_free_};
}

void SlotPool::check_slot(const char* name, int64_t slot) const {
  check(slot >= 0 && slot < num_slots(), name, " must be between 0 and num_slots - 1 = ", num_slots() - 1, ", got ",
        slot);
}

void SlotPool::check_in_use(const char* verb, int64_t slot) const {
  check_slot("slot", slot);
  check(slots_[slot].count > 0, "cannot ", verb, " slot ", slot, ": it is free");
}

int64_t SlotPool::allocate() {
  std::lock_guard lock(mutex_);
  if (num_free_ == 0) throw OutOfSlots(1, 0);
  const int32_t slot = free_[--num_free_];
  slots_[slot].count = 1;
  return slot;
}

void SlotPool::occupy(int64_t slot) {
  std::lock_guard lock(mutex_);
  check_slot("slot", slot);
  check(slots_[slot].count == 0, "cannot occupy slot ", slot, ": it is not free");
  const auto end = free_.begin() + num_free_;
  auto at = end;
  while (*--at != slot) {
  }  // it is among them, mostly the last
  std::move(at + 1, end, at);
  --num_free_;
  slots_[slot].count = 1;
}

void SlotPool::share(int64_t slot) {
  std::lock_guard lock(mutex_);
  check_in_use("share", slot);
  ++slots_[slot].count;
  place(slot);
}

void SlotPool::release(int64_t slot) {
  std::lock_guard lock(mutex_);
  check_in_use("release", slot);
  Slot& one = slots_[slot];
  check(one.count > 1 || !one.is_ranked, "cannot release slot ", slot,
        ": it has a rank, and this is the last reference");
  if (--one.count == 0) free_[num_free_++] = static_cast<int32_t>(slot);
  if (one.is_ranked) place(slot);
}

int64_t SlotPool::ref_count(int64_t slot) const {
  check_slot("slot", slot);
  std::lock_guard lock(mutex_);
  return slots_[slot].count;
}

// --- the order of eviction ---

void SlotPool::rank(int64_t slot, int64_t rank) {
  std::lock_guard lock(mutex_);
  check_in_use("rank", slot);
  num_ranked_ += !slots_[slot].is_ranked;
  slots_[slot].is_ranked = true;
  slots_[slot].rank = rank;
  place(slot);
}

void SlotPool::unrank(int64_t slot) {
  std::lock_guard lock(mutex_);
  check_slot("slot", slot);
  check(slots_[slot].is_ranked, "cannot unrank slot ", slot, ": it has no rank");
  slots_[slot].is_ranked = false;
  --num_ranked_;
  place(slot);
}

int32_t SlotPool::first_of(int32_t one, int32_t other) const {
  if (one == kNoSlot || other == kNoSlot) return std::max(one, other);
  return std::tuple(slots_[other].rank, other) < std::tuple(slots_[one].rank, one) ? other : one;
}

// Enters a slot into the order, or takes it out, as it is now.
void SlotPool::place(int64_t slot) noexcept {
  size_t at = first_leaf_ + static_cast<size_t>(slot);
  firsts_[at] = can_go(slot) ? static_cast<int32_t>(slot) : kNoSlot;
  while (at /= 2) firsts_[at] = first_of(firsts_[2 * at], firsts_[2 * at + 1]);
}

int64_t SlotPool::victim(int64_t besides, std::span<const int64_t> kept) const {
  std::lock_guard lock(mutex_);
  if (besides != kNone) check_slot("besides", besides);
  for (int64_t slot : kept) check_slot("kept", slot);
  if (!kept.empty()) return victim_with(besides, kept);
  if (besides == kNone) return firsts_[1];
  int32_t first = kNoSlot;
  for (size_t at = first_leaf_ + static_cast<size_t>(besides); at > 1; at /= 2)
    first = first_of(first, firsts_[at ^ 1]);
  return first;
}

// Looks at all slots.
int64_t SlotPool::victim_with(int64_t besides, std::span<const int64_t> kept) const {
  std::vector<bool> is_kept(slots_.size());
  for (int64_t slot : kept) is_kept[slot] = true;
  int64_t first = kNone;
  const auto order = [&](int64_t slot) {
    return std::tuple(static_cast<bool>(is_kept[slot]), slots_[slot].rank, slot);
  };
  for (int64_t slot = 0; slot < num_slots(); ++slot)
    if (slot != besides && can_go(slot) && (first == kNone || order(slot) < order(first))) first = slot;
  return first;
}

// --- for tests ---

void SlotPool::check_invariants(std::optional<std::span<const int64_t>> owned) const {
  std::lock_guard lock(mutex_);
  std::vector<bool> is_free(slots_.size());
  for (int64_t i = 0; i < num_free_; ++i) {
    const int32_t slot = free_[i];
    if (is_free[slot]) broken(slot, "is free twice");
    is_free[slot] = true;
  }
  for (int64_t slot = 0; slot < num_slots(); ++slot) {
    if (is_free[slot] && slots_[slot].count != 0) broken(slot, "is free and has references");
    if (!is_free[slot] && slots_[slot].count == 0) broken(slot, "is lost");
    if (is_free[slot] && slots_[slot].is_ranked) broken(slot, "is free and has a rank");
  }
  check_order();
  if (!owned) return;
  std::vector<uint32_t> counts(slots_.size());
  for (int64_t slot : *owned) {
    check_slot("owned", slot);
    ++counts[slot];
  }
  for (int64_t slot = 0; slot < num_slots(); ++slot)
    if (counts[slot] != slots_[slot].count)
      throw std::runtime_error("slot " + std::to_string(slot) + " has " + std::to_string(slots_[slot].count) +
                               " references and " + std::to_string(counts[slot]) + " owners");
}

void SlotPool::check_order() const {
  int64_t num_ranked = 0;
  for (int64_t slot = 0; slot < num_slots(); ++slot) {
    num_ranked += slots_[slot].is_ranked;
    const int32_t expected = can_go(slot) ? static_cast<int32_t>(slot) : kNoSlot;
    if (firsts_[first_leaf_ + static_cast<size_t>(slot)] != expected) broken(slot, "has another place in the order");
  }
  if (num_ranked != num_ranked_) throw std::runtime_error("another number of slots has a rank");
  for (size_t at = first_leaf_; at-- > 1;)
    if (firsts_[at] != first_of(firsts_[2 * at], firsts_[2 * at + 1]))
      throw std::runtime_error("the order of eviction is broken");
}

}  // namespace kvpage
