#include "slots/slot_allocator.h"

#include <bit>
#include <limits>

#include "base/check.h"

namespace kvpage {
namespace {

constexpr int64_t kWord = 64;

uint64_t bit(int64_t i) { return uint64_t{1} << (i % kWord); }

int64_t checked_max_slots(int64_t max_slots) {
  check(max_slots >= 0 && max_slots <= std::numeric_limits<int32_t>::max(),
        "max_slots must be at least 0 and below 2**31, got ", max_slots);
  return max_slots;
}

}  // namespace

SlotAllocator::SlotAllocator(int64_t max_slots)
    : versions_(static_cast<size_t>(checked_max_slots(max_slots))), free_count_(max_slots) {
  for (int64_t num_bits = max_slots; num_bits > 0;) {
    const int64_t num_words = (num_bits + kWord - 1) / kWord;
    auto& level = levels_.emplace_back(num_words, ~uint64_t{0});
    if (num_bits % kWord != 0) level.back() = bit(num_bits) - 1;
    num_bits = num_words == 1 ? 0 : num_words;
  }
}

int64_t SlotAllocator::free_count() const {
  std::lock_guard lock(mutex_);
  return free_count_;
}

int64_t SlotAllocator::alloc() {
  std::lock_guard lock(mutex_);
  if (free_count_ == 0) return kNone;
  int64_t slot = 0;
  for (size_t level = levels_.size(); level-- > 0;) slot = slot * kWord + std::countr_zero(levels_[level][slot]);
  clear_bit(slot);
  ++versions_[slot];
  return slot;
}

void SlotAllocator::occupy(int64_t slot) {
  std::lock_guard lock(mutex_);
  check_slot(slot);
  check(has_bit(slot), "slot must be free, ", slot, " is taken");
  clear_bit(slot);
}

void SlotAllocator::free(int64_t slot) {
  std::lock_guard lock(mutex_);
  check_slot(slot);
  check(!has_bit(slot), "slot must be taken, ", slot, " is free");
  set_bit(slot);
}

bool SlotAllocator::is_free(int64_t slot) const {
  std::lock_guard lock(mutex_);
  check_slot(slot);
  return has_bit(slot);
}

int64_t SlotAllocator::version(int64_t slot) const {
  std::lock_guard lock(mutex_);
  check_slot(slot);
  return versions_[slot];
}

void SlotAllocator::check_slot(int64_t slot) const {
  check(slot >= 0 && slot < max_slots(), "slot must be between 0 and max_slots - 1 = ", max_slots() - 1, ", got ",
        slot);
}

bool SlotAllocator::has_bit(int64_t slot) const { return levels_[0][slot / kWord] & bit(slot); }

// A word that becomes empty clears its bit one level up, and so on.
void SlotAllocator::clear_bit(int64_t slot) noexcept {
  --free_count_;
  for (auto& level : levels_) {
    uint64_t& word = level[slot / kWord];
    word &= ~bit(slot);
    if (word != 0) return;
    slot /= kWord;
  }
}

// A word that was empty sets its bit one level up, and so on.
void SlotAllocator::set_bit(int64_t slot) noexcept {
  ++free_count_;
  for (auto& level : levels_) {
    uint64_t& word = level[slot / kWord];
    const bool was_empty = word == 0;
    word |= bit(slot);
    if (!was_empty) return;
    slot /= kWord;
  }
}

}  // namespace kvpage
