// SlruPolicy: an entry that was found again outlives those that were not, the least recently used of each kind first.
// Once the found ones are more than four fifths of what is listed, theirs go first: segmented LRU.
#pragma once

#include "pool/eviction/eviction_policy.h"

namespace kvpage {

class SlruPolicy final : public EvictionPolicy {
 public:
  int class_of(const EvictionFacts& entry) const override { return entry.num_hits > 0; }

  double worth(const EvictionFacts& entry, int64_t) const override {
    const bool is_too_many = 5 * size_[1] > 4 * (size_[0] + size_[1]);
    return (entry.rank_class == 1) != is_too_many;
  }

  void listed(const EvictionFacts& entry, int64_t size) noexcept override { size_[entry.rank_class] += size; }

 private:
  int64_t size_[2] = {};  // of what is listed, by class
};

}  // namespace kvpage
