// VictimRanks: the entries that may go now, by what an EvictionPolicy says that they are worth.
//
//      class        RankTree
//      class 0 ---- a  f  c        first and last are asked: the least worth goes, of the same worth what stands first
//      class 1 ---- b  e
//
// An entry has facts(), rank_class and, for its RankTree, rank_key and used_at.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "pool/eviction/eviction_policy.h"
#include "pool/eviction/rank_tree.h"

namespace kvpage {

template <typename Entry, RankLinks<Entry> Entry::* Links>
class VictimRanks {
 public:
  using Tree = RankTree<Entry, Links>;

  // The entry has its class and its key.
  void insert(Entry* entry) noexcept {
    trees_[entry->rank_class].insert(entry);
    filled_ |= uint64_t{1} << entry->rank_class;
  }
  void erase(Entry* entry) noexcept {
    Tree& tree = trees_[entry->rank_class];
    tree.erase(entry);
    if (tree.empty()) filled_ &= ~(uint64_t{1} << entry->rank_class);
  }

  // Null if there is none.
  Entry* first(const EvictionPolicy& policy, int64_t now) const {
    Entry* least = nullptr;
    double least_worth = 0;
    for (uint64_t left = filled_; left != 0; left &= left - 1) {
      const Tree& tree = trees_[static_cast<size_t>(std::countr_zero(left))];
      for (Entry* entry : {tree.first(), tree.last()}) {
        const double worth = policy.worth(entry->facts(), now);
        if (least && !(worth < least_worth)) continue;
        least = entry;
        least_worth = worth;
      }
    }
    return least;
  }

  // Goes over all entries in the order in which `first` would name them at `now`, were each erased in its turn and the
  // policy not told. Nothing may be inserted or erased meanwhile.
  class Walk {
   public:
    Walk(const VictimRanks& ranks, const EvictionPolicy& policy, int64_t now) : policy_(policy), now_(now) {
      for (const Tree& tree : ranks.trees_)
        if (!tree.empty()) spans_.push_back({tree.first(), tree.last(), worth(tree.first()), worth(tree.last())});
    }

    // Null at the end.
    Entry* next() noexcept {
      size_t least = 0;
      for (size_t i = 1; i < spans_.size(); ++i)
        if (spans_[i].least() < spans_[least].least()) least = i;
      return spans_.empty() ? nullptr : take(least);
    }

   private:
    // What is left of a class.
    struct Span {
      Entry *first, *last;
      double first_worth, last_worth;
      double least() const { return last_worth < first_worth ? last_worth : first_worth; }
    };

    double worth(const Entry* entry) const { return policy_.worth(entry->facts(), now_); }

    Entry* take(size_t i) noexcept {
      Span& span = spans_[i];
      const bool is_last = span.last_worth < span.first_worth;
      Entry* entry = is_last ? span.last : span.first;
      if (span.first == span.last) {
        spans_.erase(spans_.begin() + static_cast<std::ptrdiff_t>(i));  // the others keep their order
      } else if (is_last) {
        span.last = Tree::before(entry);
        span.last_worth = worth(span.last);
      } else {
        span.first = Tree::after(entry);
        span.first_worth = worth(span.first);
      }
      return entry;
    }

    const EvictionPolicy& policy_;
    const int64_t now_;
    std::vector<Span> spans_;
  };

 private:
  std::array<Tree, EvictionPolicy::kNumClasses> trees_;
  uint64_t filled_ = 0;  // a bit for each class that is not empty
};

}  // namespace kvpage
