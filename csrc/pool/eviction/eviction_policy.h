// EvictionPolicy: what it is worth to keep an entry of a cache. An entry is a node of the prefix tree, on the device or
// on the host, or a record of a store's tier: a policy knows neither, but only EvictionFacts.
//
//      class_of   which of kNumClasses an entry is in, while it is listed
//      key_of     its place within its class: of the same key, the one that was used last stands last
//      worth      the least goes first; of the same worth, the first of the class
//
// Within a class the worth must have its least at the first or the last entry, so that a victim costs two questions a
// class, not one an entry; see VictimRanks, which asks them.
#pragma once

#include <cstdint>

namespace kvpage {

// What policies know of an entry. Times are of its cache's UseClock; they are nanoseconds where the policy heeds time.
struct EvictionFacts {
  int64_t used_at = 0;
  int64_t added_at = 0;  // when it was first listed
  int64_t next_use = 0;  // when it is expected to be used; 0: not known
  int64_t num_hits = 0;  // how often it was found
  int cost_kind = 0;  // of EvictionCosts
  int rank_class = 0;  // as class_of said when it was listed
};

class EvictionPolicy {
 public:
  static constexpr int kNumClasses = 40;

  virtual ~EvictionPolicy() = default;

  // Whether the worth changes with time, so that the clock must tell it.
  virtual bool heeds_time() const { return false; }

  virtual int class_of(const EvictionFacts&) const { return 0; }
  virtual int64_t key_of(const EvictionFacts&) const { return 0; }
  virtual double worth(const EvictionFacts&, int64_t /*now*/) const { return 0; }

  // A listed entry is found again.
  virtual void reused(const EvictionFacts&, int64_t /*size*/, int64_t /*now*/) noexcept {}

  // That much of a listed entry was evicted, and is nowhere any more.
  virtual void forgotten(const EvictionFacts&, int64_t /*size*/, int64_t /*now*/) noexcept {}

  // Entries of so much more, or less, are listed. A size is in blocks for a tree, in records for a store.
  virtual void listed(const EvictionFacts&, int64_t /*size*/) noexcept {}
};

}  // namespace kvpage
