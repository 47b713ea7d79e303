// RecordOrder: which record of a store's tier goes next. It knows records by their places alone, small numbers that it
// hands out; the tier knows which record has which place.
//
//      place     0    1    2    3         a record's facts, and its links in the VictimRanks
//                f    -    a    c         -: free, handed out next
//
// A tier skips records that are being read: it walks over all, the first to go first. A call that throws has changed
// nothing. Not thread-safe: callers hold the tier's lock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pool/eviction/cost_policy.h"
#include "pool/eviction/eviction_policy.h"
#include "pool/eviction/use_clock.h"
#include "pool/eviction/victim_ranks.h"

namespace kvpage {

class RecordWalk;

class RecordOrder {
 public:
  static constexpr double kForever = 1e9;  // seconds

  // InvalidArgument for a name that is none of eviction_policies().
  explicit RecordOrder(std::string_view policy);

  const std::string& policy() const { return name_; }
  int64_t size() const { return static_cast<int64_t>(records_.size() - free_.size()); }

  // Returns the place of one more record, which was used last so many seconds ago. The record is the newest, unless
  // the policy heeds time. InvalidArgument unless 0 <= age < kForever.
  int64_t add(double age = 0);

  // The record was read, or found. InvalidArgument for a place without a record.
  void use(int64_t place);

  // Takes a record out. `is_evicted`: to make room, which policies learn from. InvalidArgument as for `use`.
  void remove(int64_t place, bool is_evicted = false);

  // Walks over all records, the first to go first, as of now. The order must outlive the walk.
  RecordWalk walk() const;

  // For simulations: the clock stands still at so many seconds, until the next call. InvalidArgument as for an age.
  void set_time(double seconds);

  // Throws std::runtime_error that names the broken invariant.
  void check_invariants() const;

 private:
  friend class RecordWalk;

  struct Record {
    RankLinks<Record> links;
    int64_t rank_key = 0;
    int64_t used_at = 0;
    int64_t added_at = 0;
    int64_t num_hits = 0;
    int64_t place = 0;
    uint8_t rank_class = 0;
    bool is_live = false;

    EvictionFacts facts() const {
      return {.used_at = used_at, .added_at = added_at, .num_hits = num_hits, .rank_class = rank_class};
    }
  };
  using Ranks = VictimRanks<Record, &Record::links>;

  Record& at(int64_t place);
  int64_t tick() noexcept;
  int64_t now() const { return heeds_time_ ? clock_.now() : 0; }
  void list(Record* record) noexcept;
  void unlist(Record* record) noexcept;

  const std::string name_;
  const std::unique_ptr<EvictionPolicy> policy_;
  const bool heeds_time_;
  UseClock clock_;
  std::deque<Record> records_;  // by place; none ever moves
  std::vector<int64_t> free_;   // has room for every place
  Ranks ranks_;
  uint64_t num_changes_ = 0;
};

class RecordWalk {
 public:
  explicit RecordWalk(const RecordOrder& order);

  // Returns the next places, up to that many; fewer at the end. InvalidArgument if `count` is negative, or if the
  // order has changed since the walk began.
  std::vector<int64_t> take(int64_t count);

 private:
  const RecordOrder& order_;
  const uint64_t num_changes_;
  RecordOrder::Ranks::Walk walk_;
};

}  // namespace kvpage
