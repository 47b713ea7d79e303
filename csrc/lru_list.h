// LruList: the unpinned nodes of one tier by last use, linked through the nodes themselves.
//
//      oldest                                        newest
//      | leaf of a | leaf of b | trunk of a and b |  ...
//
// A node always stands before its ancestors, so the oldest one has no descendant that could still be used: evicting
// is taking the first.
#pragma once

#include "tree_node.h"

namespace kvpage {

template <TierPart TreeNode::* Tier>
class LruList {
 public:
  TreeNode* oldest() const { return oldest_; }
  static TreeNode* newer(const TreeNode* node) { return (node->*Tier).newer; }

  void push_newest(TreeNode* node) noexcept { link(node, newest_, nullptr); }
  void insert_after(TreeNode* older, TreeNode* node) noexcept { link(node, older, (older->*Tier).newer); }

  void remove(TreeNode* node) noexcept {
    TierPart& part = node->*Tier;
    (part.older ? (part.older->*Tier).newer : oldest_) = part.newer;
    (part.newer ? (part.newer->*Tier).older : newest_) = part.older;
    part.older = part.newer = nullptr;
  }

 private:
  void link(TreeNode* node, TreeNode* older, TreeNode* newer) noexcept {
    (node->*Tier).older = older;
    (node->*Tier).newer = newer;
    (older ? (older->*Tier).newer : oldest_) = node;
    (newer ? (newer->*Tier).older : newest_) = node;
  }

  TreeNode* oldest_ = nullptr;
  TreeNode* newest_ = nullptr;
};

}  // namespace kvpage
