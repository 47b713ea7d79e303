#include "tree/nodes/sibling_index.h"

#include <algorithm>

namespace kvpage {
namespace {

uint64_t rank(const TreeNode* node) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(node) >> 6) * 0x9e3779b97f4a7c15ull;
}

// The place of a node in the treap: the link that leads to it and the node that has the link.
struct Place {
  TreeNode* above;  // null at the top
  TreeNode** link;

  void put(TreeNode* node) const noexcept {
    *link = node;
    if (node) node->above = above;
  }
};

}  // namespace

bool SiblingIndex::less(const TreeNode* a, const TreeNode* b) const {
  const int32_t* left = a->tokens.data();
  const int32_t* right = b->tokens.data();
  return std::lexicographical_compare(left, left + block_size_, right, right + block_size_);
}

SiblingIndex::Common SiblingIndex::longest_common(const TreeNode* parent, const TokenView& tokens, int64_t start,
                                                  int64_t count) const {
  Common best{nullptr, 0};
  for (TreeNode* node = count > 0 ? parent->children : nullptr; node;) {
    const int64_t common = tokens.common_prefix(start, node->tokens.data(), count);
    if (common > best.num_tokens) best = {node, common};
    if (common == count) break;
    node = tokens.at(start + common) < node->tokens.data()[common] ? node->left : node->right;
  }
  return best;
}

void SiblingIndex::insert(TreeNode* parent, TreeNode* child) const noexcept {
  Place place{nullptr, &parent->children};
  while (*place.link && rank(*place.link) >= rank(child)) {
    TreeNode* above = *place.link;
    place = {above, less(child, above) ? &above->left : &above->right};
  }
  // The treap here is parted into the nodes before the child and the nodes after it.
  TreeNode* rest = *place.link;
  place.put(child);
  Place before{child, &child->left}, after{child, &child->right};
  while (rest) {
    const bool is_before = less(rest, child);
    (is_before ? before : after).put(rest);
    TreeNode** link = is_before ? &rest->right : &rest->left;
    (is_before ? before : after) = {rest, link};
    rest = *link;
  }
  *before.link = *after.link = nullptr;
}

void SiblingIndex::erase(TreeNode* parent, TreeNode* child) const noexcept {
  TreeNode* above = std::exchange(child->above, nullptr);
  Place place{above, !above ? &parent->children : above->left == child ? &above->left : &above->right};
  TreeNode* before = std::exchange(child->left, nullptr);
  TreeNode* after = std::exchange(child->right, nullptr);
  while (before && after) {
    if (rank(before) >= rank(after)) {
      place.put(before);
      place = {before, &before->right};
      before = before->right;
    } else {
      place.put(after);
      place = {after, &after->left};
      after = after->left;
    }
  }
  place.put(before ? before : after);
}

}  // namespace kvpage
