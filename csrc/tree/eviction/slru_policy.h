// SlruPolicy: a node that was found again outlives those that were not, the least recently used of each kind first.
// Once the found ones are more than four fifths of the unpinned blocks, theirs go first: segmented LRU.
#pragma once

#include <algorithm>

#include "tree/eviction/eviction_policy.h"

namespace kvpage {

class SlruPolicy final : public EvictionPolicy {
 public:
  int class_of(const TreeNode& node) const override { return node.num_hits > 0; }

  double worth(const TreeNode& node, int64_t now) const override {
    const bool is_too_many = 5 * num_blocks_[1] > 4 * (num_blocks_[0] + num_blocks_[1]);
    const bool is_kept = (node.rank_class == 1) != is_too_many;
    const int64_t age = std::max<int64_t>(now - static_cast<int64_t>(node.used_at), 0);  // uses of one moment are later
    return (is_kept ? 1e30 : 1.0) / (1.0 + static_cast<double>(age));
  }

  void reused(const TreeNode&, int64_t) noexcept override {}
  void forgotten(const TreeNode&, int64_t, int64_t) noexcept override {}
  void listed(const TreeNode& node, int64_t num_blocks) noexcept override {
    num_blocks_[node.rank_class] += num_blocks;
  }

 private:
  int64_t num_blocks_[2] = {};  // of listed nodes, by class
};

}  // namespace kvpage
