// RankTree: nodes by a key, linked through themselves, so that the first and the last are found at once. A treap; a
// node's rank in it comes from its address. Equal keys stand in the order of addresses.
#pragma once

#include <cstdint>

#include "tree/nodes/tree_node.h"

namespace kvpage {

template <RankLinks TreeNode::* Links>
class RankTree {
 public:
  bool empty() const { return top_ == nullptr; }
  TreeNode* first() const { return end(&RankLinks::left); }
  TreeNode* last() const { return end(&RankLinks::right); }

  void insert(TreeNode* node) noexcept {
    TreeNode** place = &top_;
    TreeNode* above = nullptr;
    while (*place && !outranks(node, *place)) {
      above = *place;
      place = less(node, above) ? &(above->*Links).left : &(above->*Links).right;
    }
    TreeNode* below = *place;
    *place = node;
    (node->*Links).above = above;
    split(below, node);
  }

  void erase(TreeNode* node) noexcept {
    RankLinks& links = node->*Links;
    TreeNode* above = links.above;
    TreeNode*& place = !above ? top_ : (above->*Links).left == node ? (above->*Links).left : (above->*Links).right;
    merge(links.left, links.right, &place, above);
    links = RankLinks();
  }

 private:
  static uint64_t weight(const TreeNode* node) { return reinterpret_cast<uintptr_t>(node) * 0x9E3779B97F4A7C15u; }
  static bool outranks(const TreeNode* a, const TreeNode* b) { return weight(a) > weight(b); }
  static bool less(const TreeNode* a, const TreeNode* b) {
    return a->rank_key() != b->rank_key() ? a->rank_key() < b->rank_key() : a < b;
  }

  TreeNode* end(TreeNode* RankLinks::* side) const {
    TreeNode* node = top_;
    while (node && (node->*Links).*side) node = (node->*Links).*side;
    return node;
  }

  static void set(TreeNode** place, TreeNode* node, TreeNode* above) noexcept {
    *place = node;
    if (node) (node->*Links).above = above;
  }

  // Hangs what was below the node's place under it, the smaller keys left.
  static void split(TreeNode* from, TreeNode* node) noexcept {
    TreeNode **left = &(node->*Links).left, **right = &(node->*Links).right;
    TreeNode *above_left = node, *above_right = node;
    while (from) {
      if (less(from, node)) {
        set(left, from, above_left);
        above_left = from;
        left = &(from->*Links).right;
        from = *left;
      } else {
        set(right, from, above_right);
        above_right = from;
        right = &(from->*Links).left;
        from = *right;
      }
    }
    *left = *right = nullptr;
  }

  static void merge(TreeNode* left, TreeNode* right, TreeNode** place, TreeNode* above) noexcept {
    while (left && right) {
      const bool is_left = outranks(left, right);
      TreeNode*& taken = is_left ? left : right;
      set(place, taken, above);
      above = taken;
      place = is_left ? &(taken->*Links).right : &(taken->*Links).left;
      taken = *place;
    }
    set(place, left ? left : right, above);
  }

  TreeNode* top_ = nullptr;
};

}  // namespace kvpage
