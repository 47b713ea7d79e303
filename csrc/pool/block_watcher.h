// BlockWatcher: what a PrefixTree tells of cached blocks that get a copy in the other tier.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

namespace kvpage {

// From one tier's block to the other's.
using TierPair = std::pair<int32_t, int32_t>;

class BlockWatcher {
 public:
  virtual ~BlockWatcher() = default;

  // The pairs of one call, in order; the last one counts of those that go to one block. It is called with the tree's
  // mutex, before any block of the pairs can be given to another: it must not call the tree.
  virtual void moved(std::span<const TierPair> pairs, bool to_host) noexcept = 0;
};

}  // namespace kvpage
