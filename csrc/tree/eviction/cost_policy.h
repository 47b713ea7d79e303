// CostPolicy: a block is worth what it costs to compute, divided by the time that it will lie there for one use. Blocks
// are of one size. The cost is that of the first block of a class of depths, each four times as deep as the one before.
//
// With a hint that time is |next use - now|: the longer a use is overdue, the longer it is expected to take. Without
// one it is learned, as LHD does (Beckmann et al., NSDI 2018): of nodes of the same depth that were found as often,
// which part is found after that age, and how long do they lie there until they are found or forgotten?
//
//      hits, gone  [class][age]   blocks that were found at that age, and forgotten at it
//      worth       [class][age]   hits from that age on / block-time from that age on
//
// Ages are counted in half powers of two. Without evidence the worth is 1 / (4 * age): least recently used goes first.
#pragma once

#include <array>

#include "tree/eviction/eviction_policy.h"

namespace kvpage {

class CostPolicy final : public EvictionPolicy {
 public:
  // `num_blocks`: of the device tier. Of what happened, the last few times as many blocks count.
  CostPolicy(int64_t num_blocks, int64_t block_size);

  int class_of(const TreeNode& node) const override;
  double worth(const TreeNode& node, int64_t now) const override;
  void reused(const TreeNode& node, int64_t now) noexcept override;
  void forgotten(const TreeNode& node, int64_t num_blocks, int64_t now) noexcept override;
  void listed(const TreeNode&, int64_t) noexcept override {}

 private:
  static constexpr int kNumDepths = 8, kNumHits = 4, kNumLearned = kNumDepths * kNumHits, kNumAges = 64;
  using Ages = std::array<double, kNumAges>;

  static double age_of(const TreeNode& node, int64_t now);
  void count(std::array<Ages, kNumLearned>* events, const TreeNode& node, int64_t num_blocks, int64_t now) noexcept;
  void learn() noexcept;
  double learned(int kind, double age) const;

  const double num_window_;  // blocks that are counted between two lessons
  double num_counted_ = 0;
  std::array<double, kNumDepths> cost_;  // of a block, by depth; 1 for the first
  std::array<Ages, kNumLearned> hits_{}, gone_{}, worth_{};
};

}  // namespace kvpage
