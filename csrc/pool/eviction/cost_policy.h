// CostPolicy: an entry is worth what it costs to compute a unit of its size, divided by the time that it will lie there
// for one use. The cost is that of its kind; see EvictionCosts.
//
// With a hint that time is |next use - now|: the longer a use is overdue, the longer it is expected to take. Without
// one it is learned, as LHD does (Beckmann et al., NSDI 2018): of entries of the same kind that were found as often,
// which part is found after that age, and how long do they lie there until they are found or forgotten?
//
//      hits, gone  [class][age]   what was found at that age, and forgotten at it
//      worth       [class][age]   hits from that age on / size x time from that age on
//
// Ages are counted in half powers of two. Without evidence the worth is 1 / (4 * age): least recently used goes first.
#pragma once

#include <array>
#include <cstdint>

#include "pool/eviction/eviction_policy.h"

namespace kvpage {

// What a unit of an entry's size costs, for kinds of entries; and how much the cache is expected to hold.
struct EvictionCosts {
  static constexpr int kNumKinds = 8;
  static constexpr int64_t kAsListed = 0;

  std::array<double, kNumKinds> of_kind{};
  int64_t size = kAsListed;  // in blocks, or records; kAsListed where that is not known: as much as is listed

  // Of blocks: a kind is a class of depths, each four times as deep as the one before. The cost is that of its first.
  static EvictionCosts by_depth(int64_t num_blocks, int64_t block_size);
  static int kind_of_depth(int64_t num_blocks_before);

  // Of records: those of as many bytes cost the same.
  static EvictionCosts equal();
};

class CostPolicy final : public EvictionPolicy {
 public:
  explicit CostPolicy(const EvictionCosts& costs);

  bool heeds_time() const override { return true; }
  int class_of(const EvictionFacts& entry) const override;
  int64_t key_of(const EvictionFacts& entry) const override;
  double worth(const EvictionFacts& entry, int64_t now) const override;
  void reused(const EvictionFacts& entry, int64_t size, int64_t now) noexcept override;
  void forgotten(const EvictionFacts& entry, int64_t size, int64_t now) noexcept override;
  void listed(const EvictionFacts& entry, int64_t size) noexcept override;

 private:
  static constexpr int kNumHits = 4, kNumLearned = EvictionCosts::kNumKinds * kNumHits, kNumAges = 64;
  using Ages = std::array<double, kNumAges>;

  static double age_of(const EvictionFacts& entry, int64_t now);
  void count(std::array<Ages, kNumLearned>* events, const EvictionFacts& entry, int64_t size, int64_t now) noexcept;
  void learn() noexcept;
  double learned(int kind, double age) const;

  const EvictionCosts costs_;
  double window_ = 0;  // what is counted between two lessons: the last few times as much as the cache holds counts
  double counted_ = 0;
  int64_t size_listed_ = 0;
  std::array<Ages, kNumLearned> hits_{}, gone_{}, worth_{};
};

}  // namespace kvpage
