// SlotPool: the state slots of one tier, a count of references on each, a stack of those that are free, and the order
// in which those with a rank are evicted.
//
//      free stack         slot    0   1   2   3   4   5
//      | 4 |  <- top      count   1   1   2   1   0   0        2: one of them is a reader, who keeps it as it is
//      | 5 |              rank    -  30  10  20   -   -        without a rank: in use by a sequence
//
//      order                    3                   of each half, the slot to evict first: the smallest rank of those
//                          1          3             with one reference. Slot 2 has another one.
//                       .    1     .    3
//
// A fresh pool hands out ascending slots. What was released last is handed out first.
//
// Every call holds the pool's mutex and is all or nothing: one that throws has changed nothing.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace kvpage {

class SlotPool {
 public:
  static constexpr int64_t kNone = -1;

  // Throws InvalidArgument unless 0 <= num_slots < 2^30.
  explicit SlotPool(int64_t num_slots);

  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t num_free() const;
  int64_t num_ranked() const;

  // The free slots; the next one to hand out stands last.
  std::vector<int32_t> free_slots() const;

  // Returns a slot with one reference and no rank, or throws OutOfSlots.
  int64_t allocate();

  // Does the same with one free slot out of all. InvalidArgument if it is out of range or not free.
  void occupy(int64_t slot);

  // One more reference. InvalidArgument if the slot is out of range or free.
  void share(int64_t slot);

  // One reference less; a slot without any becomes free. InvalidArgument if the slot is out of range or free, and for
  // the last reference of one with a rank.
  void release(int64_t slot);

  // InvalidArgument if out of range.
  int64_t ref_count(int64_t slot) const;

  // Gives a slot its place in the order of eviction, or another one. InvalidArgument if it is out of range or free.
  void rank(int64_t slot, int64_t rank);

  // Takes a slot out of the order. InvalidArgument if it has no rank.
  void unrank(int64_t slot);

  // Returns the slot with the smallest rank, the lowest one of several, among those with one reference: not `besides`,
  // and one of `kept` only where there is no other. kNone without any. InvalidArgument for a slot that is out of range.
  int64_t victim(int64_t besides, std::span<const int64_t> kept) const;

  // Throws std::runtime_error that names the broken invariant; with `owned`, also that these are all references, a slot
  // once for each. O(num_slots).
  void check_invariants(std::optional<std::span<const int64_t>> owned) const;

 private:
  struct Slot {
    int64_t rank = 0;
    uint32_t count = 0;
    bool is_ranked = false;
  };

  static constexpr int32_t kNoSlot = -1;

  void check_slot(const char* name, int64_t slot) const;
  void check_in_use(const char* verb, int64_t slot) const;
  bool can_go(int64_t slot) const { return slots_[slot].is_ranked && slots_[slot].count == 1; }
  int32_t first_of(int32_t one, int32_t other) const;
  int64_t victim_with(int64_t besides, std::span<const int64_t> kept) const;
  void place(int64_t slot) noexcept;
  void check_order() const;

  mutable std::mutex mutex_;
  std::vector<Slot> slots_;      // [num_slots]
  std::vector<int32_t> free_;    // [num_slots], of which the first num_free_ are the stack
  std::vector<int32_t> firsts_;  // of each pair, the one to evict first: a heap's tree, its leaves are the slots
  size_t first_leaf_;
  int64_t num_free_;
  int64_t num_ranked_ = 0;
};

}  // namespace kvpage
