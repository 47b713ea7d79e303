// SiblingIndex: the children of a node in the order of their first blocks' tokens, so that the one which shares the
// longest part of a block is found without looking at all of them: it is a neighbour of the place where the wanted
// tokens would be. A treap through the nodes themselves; a node's rank in it comes from its address. Nodes know what
// is above them, so that erasing one looks at a few nodes around it, not at the path that leads there: eviction stays
// O(1) however many siblings there are.
#pragma once

#include <cstdint>

#include "base/token_view.h"
#include "tree/nodes/tree_node.h"

namespace kvpage {

class SiblingIndex {
 public:
  explicit SiblingIndex(int64_t block_size) : block_size_(block_size) {}

  struct Common {
    TreeNode* child;  // null if no child shares a token
    int64_t num_tokens;
  };

  // Returns the child whose first block shares most tokens with the `count` tokens from `start` on.
  Common longest_common(const TreeNode* parent, const TokenView& tokens, int64_t start, int64_t count) const;

  // Requires that no sibling has the same first block.
  void insert(TreeNode* parent, TreeNode* child) const noexcept;
  void erase(TreeNode* parent, TreeNode* child) const noexcept;

 private:
  bool less(const TreeNode* a, const TreeNode* b) const;

  int64_t block_size_;
};

}  // namespace kvpage
