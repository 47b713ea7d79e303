// RankedOrder: which unpinned node loses its blocks next, by what an EvictionPolicy says that nodes are worth.
//
//      tier      list of EvictionOrder     VictimRanks of the nodes that may go now
//      device -- put first
//            |-- priority 0 ------------- a  f  c  b  e
//            `-- priority 1 ...
//      host   -- ...
//
// A node may go from a tier if it is unpinned and none of its children has blocks there: so each path loses its end
// first. A parent gets its turn when its last child has left. Entering and leaving cost O(log n).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "pool/eviction/eviction_policy.h"
#include "pool/eviction/victim_ranks.h"
#include "tree/nodes/tree_node.h"

namespace kvpage {

class RankedOrder {
 public:
  static constexpr int kNumLists = kNumPriorities - kFirstToGo;

  explicit RankedOrder(std::unique_ptr<EvictionPolicy> policy) : policy_(std::move(policy)) {}

  void list(TreeNode* node, int64_t now) noexcept;
  void unlist(TreeNode* node) noexcept;

  // A node is found again, after `unlist`. Who was expected has come, unless several paths go on from it.
  void reuse(TreeNode* node, int64_t now) noexcept {
    policy_->reused(node->facts(), node->num_blocks, now);
    if (node->num_children <= 1) node->next_use = 0;
  }
  void forget(TreeNode* node, int64_t num_blocks, int64_t now) noexcept {
    policy_->forgotten(node->facts(), num_blocks, now);
    policy_->listed(node->facts(), -num_blocks);
    node->num_listed_blocks -= static_cast<int32_t>(num_blocks);
  }

  // Tells whether the node has blocks in each tier now.
  void refresh(TreeNode* node, bool has_device, bool has_host, int64_t now) noexcept;

  // After `upper` was cut off the front of `lower`. It is listed where `lower` is.
  void split(TreeNode* lower, TreeNode* upper) noexcept;

  // When the node is expected to be used: the earliest of what was told, as long as that is not over.
  void set_next_use(TreeNode* node, int64_t next_use, int64_t now) noexcept;

  // Null if no unpinned node has a block in the tier.
  TreeNode* first_on_device(int64_t now) const { return first(on_device_, now); }
  TreeNode* first_on_host(int64_t now) const { return first(on_host_, now); }
  bool before(const TreeNode* a, const TreeNode* b, int64_t now) const;

  // Whether the node may go, as its children say: for check_invariants.
  static bool is_ranked_on_device(const TreeNode* node) { return node->rank_flags & kRankedOnDevice; }
  static bool is_ranked_on_host(const TreeNode* node) { return node->rank_flags & kRankedOnHost; }

 private:
  template <RankLinks<TreeNode> TreeNode::* Links>
  using Tier = std::array<VictimRanks<TreeNode, Links>, kNumLists>;

  enum Flag : uint8_t { kListed = 1, kHasDevice = 2, kHasHost = 4, kRankedOnDevice = 8, kRankedOnHost = 16 };

  template <typename AnyTier>
  TreeNode* first(const AnyTier& tier, int64_t now) const {
    for (const auto& list : tier)
      if (TreeNode* node = list.first(*policy_, now)) return node;
    return nullptr;
  }
  void classify(TreeNode* node) noexcept;
  void rank(TreeNode* node) noexcept;
  void unrank(TreeNode* node) noexcept;
  static void set_flag(TreeNode* node, Flag flag, bool is_set) noexcept {
    node->rank_flags = static_cast<uint8_t>(is_set ? node->rank_flags | flag : node->rank_flags & ~flag);
  }

  std::unique_ptr<EvictionPolicy> policy_;
  Tier<&TreeNode::device_rank> on_device_;
  Tier<&TreeNode::host_rank> on_host_;
};

}  // namespace kvpage
