// RankTree: entries by a key, linked through themselves. A treap; an entry's rank in it comes from its address. The
// first, the last, and one that comes after all others cost O(1), anything else O(log n).
//
// An entry has `rank_key` and `used_at`, neither of which changes while it is in a tree. Of the same key, the one that
// was used later stands later; of the same use, the order is that of addresses.
#pragma once

#include <cstdint>

namespace kvpage {

// Neighbours in a RankTree.
template <typename Entry>
struct RankLinks {
  Entry* left = nullptr;
  Entry* right = nullptr;
  Entry* above = nullptr;
};

template <typename Entry, RankLinks<Entry> Entry::* Links>
class RankTree {
 public:
  bool empty() const { return top_ == nullptr; }
  Entry* first() const { return first_; }
  Entry* last() const { return last_; }

  // Null at the end.
  static Entry* after(const Entry* entry) {
    return neighbour(entry, &RankLinks<Entry>::right, &RankLinks<Entry>::left);
  }
  static Entry* before(const Entry* entry) {
    return neighbour(entry, &RankLinks<Entry>::left, &RankLinks<Entry>::right);
  }

  static bool less(const Entry* a, const Entry* b) {
    if (a->rank_key != b->rank_key) return a->rank_key < b->rank_key;
    return a->used_at != b->used_at ? a->used_at < b->used_at : a < b;
  }

  void insert(Entry* entry) noexcept {
    if (last_ && less(last_, entry)) return append(entry);
    if (!first_ || less(entry, first_)) first_ = entry;
    if (!last_) last_ = entry;
    Entry** place = &top_;
    Entry* above = nullptr;
    while (*place && !outranks(entry, *place)) {
      above = *place;
      place = less(entry, above) ? &(above->*Links).left : &(above->*Links).right;
    }
    Entry* below = *place;
    *place = entry;
    (entry->*Links).above = above;
    split(below, entry);
  }

  void erase(Entry* entry) noexcept {
    if (entry == first_) first_ = after(entry);
    if (entry == last_) last_ = before(entry);
    RankLinks<Entry>& links = entry->*Links;
    Entry* above = links.above;
    Entry*& place = !above ? top_ : (above->*Links).left == entry ? (above->*Links).left : (above->*Links).right;
    merge(links.left, links.right, &place, above);
    links = RankLinks<Entry>();
  }

 private:
  using Side = Entry* RankLinks<Entry>::*;

  // Neighbouring addresses have weights far apart, and no two the same.
  static uint64_t weight(const Entry* entry) {
    uint64_t bits = reinterpret_cast<uintptr_t>(entry);
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    return (bits ^ bits >> 27) * 0x94D049BB133111EBu;
  }
  static bool outranks(const Entry* a, const Entry* b) { return weight(a) > weight(b); }

  static Entry* neighbour(const Entry* entry, Side towards, Side back) {
    Entry* next = (entry->*Links).*towards;
    if (next) {
      while ((next->*Links).*back) next = (next->*Links).*back;
      return next;
    }
    for (next = (entry->*Links).above; next && (next->*Links).*towards == entry; next = (next->*Links).above)
      entry = next;
    return next;
  }

  // Goes up from the last one, which is near in most cases.
  void append(Entry* entry) noexcept {
    Entry *below = nullptr, *above = last_;
    while (above && outranks(entry, above)) {
      below = above;
      above = (above->*Links).above;
    }
    set(&(entry->*Links).left, below, entry);
    set(above ? &(above->*Links).right : &top_, entry, above);
    last_ = entry;
  }

  static void set(Entry** place, Entry* entry, Entry* above) noexcept {
    *place = entry;
    if (entry) (entry->*Links).above = above;
  }

  // Hangs what was below the entry's place under it, the smaller keys left.
  static void split(Entry* from, Entry* entry) noexcept {
    Entry **left = &(entry->*Links).left, **right = &(entry->*Links).right;
    Entry *above_left = entry, *above_right = entry;
    while (from) {
      if (less(from, entry)) {
        set(left, from, above_left);
        above_left = from;
        left = &(from->*Links).right;
        from = *left;
      } else {
        set(right, from, above_right);
        above_right = from;
        right = &(from->*Links).left;
        from = *right;
      }
    }
    *left = *right = nullptr;
  }

  static void merge(Entry* left, Entry* right, Entry** place, Entry* above) noexcept {
    while (left && right) {
      const bool is_left = outranks(left, right);
      Entry*& taken = is_left ? left : right;
      set(place, taken, above);
      above = taken;
      place = is_left ? &(taken->*Links).right : &(taken->*Links).left;
      taken = *place;
    }
    set(place, left ? left : right, above);
  }

  Entry* top_ = nullptr;
  Entry* first_ = nullptr;
  Entry* last_ = nullptr;
};

}  // namespace kvpage
