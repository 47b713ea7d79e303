// PrefixTree: blocks that are forgotten, in both tiers.
#include <algorithm>

#include "tree/prefix_tree.h"

namespace kvpage {

int64_t PrefixTree::drop(const TokenView& tokens, std::string_view name) {
  std::lock_guard lock(mutex_);
  TreeNode* root = find_root(name);
  if (!root) return 0;
  const Place place = walk(root, tokens, tokens.size() / block_size_);
  if (place.in_edge < place.node->num_blocks) return 0;
  int64_t num_dropped = 0;
  for (TreeNode* node = place.node; !node->is_root() && node->num_pins == 0 && node->num_children == 0;) {
    TreeNode* parent = node->parent;
    const bool is_last = parent->is_root();
    num_dropped += node->num_blocks;
    forget_end(node, 0);
    if (is_last) break;  // the root may be gone
    node = parent;
  }
  return num_dropped * block_size_;
}

// Forgets an unpinned node's descendants, which are on the host only and unpinned, too.
void PrefixTree::forget_below(TreeNode* node) noexcept {
  for (TreeNode* at = node;;) {
    if (at->children) {
      at = at->children;
    } else if (at == node) {
      return;
    } else {
      TreeNode* parent = at->parent;
      evict_end(at, 0);
      at = parent;
    }
  }
}

// Forgets a node's end as forget_end does, and remembers that.
void PrefixTree::evict_end(TreeNode* node, int64_t num_blocks) noexcept {
  if (num_blocks == 0) {
    evicted_.add(node->hash);
  } else if (num_blocks < node->num_blocks) {
    node->point = ++last_point_;
    const TokenView tokens(node->tokens.data(), node->tokens.size());
    evicted_.add(children_.hash(node->point, tokens, num_blocks * block_size_));
  }
  forget_end(node, num_blocks);
}

// Shortens an unpinned node without children to its first `num_blocks` blocks, in both tiers; to none removes it.
void PrefixTree::forget_end(TreeNode* node, int64_t num_blocks) noexcept {
  const auto device_ids = node->device_ids.span();
  if (num_blocks < node->num_device_blocks()) {
    const auto dropped = device_ids.subspan(static_cast<size_t>(num_blocks));
    pool_->drop(dropped);
    log_left(ChangeKind::kLeftDevice, node, dropped);
    num_cached_ -= static_cast<int64_t>(dropped.size());
    num_evictable_ -= static_cast<int64_t>(dropped.size());
  }
  drop_host(node, num_blocks);
  if (num_companions_ > 0) drop_companions(node, num_blocks);
  if (num_blocks == 0) return remove_leaf(node);
  if (num_blocks < node->host_ids.size()) node->shorten_host_ids(num_blocks);
  if (num_blocks < node->num_device_blocks()) node->device_ids.truncate(num_blocks);
  node->tokens.truncate(num_blocks * block_size_);
  node->num_blocks = static_cast<int32_t>(num_blocks);
}

// The node's blocks are given back already.
void PrefixTree::remove_leaf(TreeNode* node) noexcept {
  TreeNode* parent = node->parent;
  children_.erase(node);
  siblings_.erase(parent, node);
  order_.remove(node);
  arena_.give_back(node);
  --parent->num_children;
  if (parent->is_root()) drop_unused_root(parent);
}

}  // namespace kvpage
