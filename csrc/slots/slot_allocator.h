// SlotAllocator: which whole-sequence slots are free, and how often each has been handed out.
//
//      level 1                     1 1 0 ...            one bit a word of level 0: has it a free slot?
//                                  | | `----------.
//      level 0    0 1 1 0 ... 0   1 1 1 ... 1   0 0 0 ... 0      one bit a slot: is it free?
//
// Each level has a 64th of the bits of the one below, up to a single word, so the lowest free slot is found by
// counting trailing zeros once a level: two levels for 4,096 slots, three for 262,144, six for 2^31.
//
// A slot's version is how often alloc has given it out. A caller that remembers the contents of a slot remembers its
// version too: while it is the same, the slot was given to no other writer. `occupy` takes a free slot back as it
// is, with what it holds.
//
// Every call holds the allocator's mutex. One that throws has changed nothing.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace kvpage {

class SlotAllocator {
 public:
  static constexpr int64_t kNone = -1;

  // Throws InvalidArgument unless 0 <= max_slots < 2^31.
  explicit SlotAllocator(int64_t max_slots);

  int64_t max_slots() const { return static_cast<int64_t>(versions_.size()); }
  int64_t free_count() const;

  // The lowest free slot, with a new version; kNone if there is none.
  int64_t alloc();

  // Takes a free slot as it is, without a new version. InvalidArgument if it is out of range or taken.
  void occupy(int64_t slot);

  // InvalidArgument if it is out of range or free. The version stays.
  void free(int64_t slot);

  // InvalidArgument if out of range.
  bool is_free(int64_t slot) const;
  int64_t version(int64_t slot) const;

 private:
  void check_slot(int64_t slot) const;
  bool has_bit(int64_t slot) const;
  void clear_bit(int64_t slot) noexcept;
  void set_bit(int64_t slot) noexcept;

  mutable std::mutex mutex_;
  std::vector<int64_t> versions_;               // [max_slots]
  std::vector<std::vector<uint64_t>> levels_;   // the last is one word; empty without slots
  int64_t free_count_;
};

}  // namespace kvpage
