// LruList: nodes by last use, linked through themselves.
//
//      oldest                                        newest
//      | leaf of a | leaf of b | trunk of a and b |  ...
//
// A node is always before its ancestors, so the oldest one has no descendant that could still be used: evicting
// is taking the first.
#pragma once

#include "tree/nodes/tree_node.h"

namespace kvpage {

template <LruLinks TreeNode::* Links>
class LruList {
 public:
  TreeNode* oldest() const { return oldest_; }
  TreeNode* newest() const { return newest_; }
  static TreeNode* older(const TreeNode* node) { return (node->*Links).older; }
  static TreeNode* newer(const TreeNode* node) { return (node->*Links).newer; }

  void push_newest(TreeNode* node) noexcept { link(node, newest_, nullptr); }

  // Null for `older`: the node becomes the oldest.
  void insert_after(TreeNode* older, TreeNode* node) noexcept {
    link(node, older, older ? (older->*Links).newer : oldest_);
  }

  void remove(TreeNode* node) noexcept {
    LruLinks& links = node->*Links;
    (links.older ? (links.older->*Links).newer : oldest_) = links.newer;
    (links.newer ? (links.newer->*Links).older : newest_) = links.older;
    links.older = links.newer = nullptr;
  }

 private:
  void link(TreeNode* node, TreeNode* older, TreeNode* newer) noexcept {
    (node->*Links).older = older;
    (node->*Links).newer = newer;
    (older ? (older->*Links).newer : oldest_) = node;
    (newer ? (newer->*Links).older : newest_) = node;
  }

  TreeNode* oldest_ = nullptr;
  TreeNode* newest_ = nullptr;
};

}  // namespace kvpage
