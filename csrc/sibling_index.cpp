#include "sibling_index.h"

#include <algorithm>

namespace kvpage {
namespace {

uint64_t rank(const TreeNode* node) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(node) >> 6) * 0x9e3779b97f4a7c15ull;
}

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
  TreeNode** link = &parent->children;
  while (*link && rank(*link) >= rank(child)) link = less(child, *link) ? &(*link)->left : &(*link)->right;
  // What stood here is parted into what comes before the child and what comes after it.
  TreeNode* rest = *link;
  *link = child;
  TreeNode** before = &child->left;
  TreeNode** after = &child->right;
  while (rest) {
    TreeNode**& side = less(rest, child) ? before : after;
    *side = rest;
    side = &side == &before ? &rest->right : &rest->left;
    rest = *side;
  }
  *before = *after = nullptr;
}

void SiblingIndex::erase(TreeNode* parent, TreeNode* child) const noexcept {
  TreeNode** link = &parent->children;
  while (*link != child) link = less(child, *link) ? &(*link)->left : &(*link)->right;
  TreeNode* before = std::exchange(child->left, nullptr);
  TreeNode* after = std::exchange(child->right, nullptr);
  while (before && after) {
    if (rank(before) >= rank(after)) {
      *link = before;
      link = &before->right;
      before = *link;
    } else {
      *link = after;
      link = &after->left;
      after = *link;
    }
  }
  *link = before ? before : after;
}

}  // namespace kvpage
