// The policies that are nothing but an order.
#pragma once

#include "pool/eviction/eviction_policy.h"

namespace kvpage {

// The least recently used goes first: all keys are the same. A tree does this by its lists; see EvictionOrder.
class LruPolicy final : public EvictionPolicy {};

// What was found least often goes first; of several, the least recently used.
class LfuPolicy final : public EvictionPolicy {
 public:
  int64_t key_of(const EvictionFacts& entry) const override { return entry.num_hits; }
};

// What came first goes first, however often it is found.
class FifoPolicy final : public EvictionPolicy {
 public:
  int64_t key_of(const EvictionFacts& entry) const override { return entry.added_at; }
};

}  // namespace kvpage
