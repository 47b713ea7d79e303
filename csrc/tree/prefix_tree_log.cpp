// PrefixTree: its changes, as a follower sees them.
#include "base/check.h"
#include "tree/prefix_tree.h"

namespace kvpage {
namespace {

// A node's block, as the one before another.
int64_t reference(const TreeNode* node, int64_t block) {
  if (block < node->num_device_blocks()) return node->device_ids.data()[block];
  return host_reference(node->host_ids.data()[block]);
}

// A node's blocks as if they were inserted now, and written to the host.
void add_node(const TreeNode* node, int64_t before, TreeChanges* all) {
  for (int64_t block = 0; block < node->num_blocks; ++block) {
    const bool is_on_device = block < node->num_device_blocks();
    const int32_t host_id = node->has_host_block(block) ? node->host_ids.data()[block] : kNoBlock;
    if (is_on_device) {
      const int32_t id = node->device_ids.data()[block];
      all->changes.push_back({ChangeKind::kInserted, id, before});
      if (host_id != kNoBlock) all->changes.push_back({ChangeKind::kWritten, host_id, id});
    } else {
      all->changes.push_back({ChangeKind::kInsertedHost, host_id, before});
    }
    before = reference(node, block);
  }
  const auto tokens = node->tokens.span();
  all->tokens.insert(all->tokens.end(), tokens.begin(), tokens.end());
}

void push_unless_null(const TreeNode* node, std::vector<const TreeNode*>* nodes) {
  if (node) nodes->push_back(node);
}

}  // namespace

void PrefixTree::log_changes(int64_t max_bytes) {
  std::lock_guard lock(mutex_);
  check(max_bytes >= 0, "max_bytes must not be negative, got ", max_bytes);
  log_ = max_bytes > 0 ? std::make_unique<TreeLog>(max_bytes) : nullptr;
  order_.keep_time(max_bytes > 0);
  log_begin_ = static_cast<uint64_t>(order_.clock().now());
}

void PrefixTree::lose_changes() {
  std::lock_guard lock(mutex_);
  if (log_) log_->lose();
}

TreeChanges PrefixTree::take_changes() {
  std::lock_guard lock(mutex_);
  check(log_ != nullptr, "log_changes must be called before take_changes");
  TreeChanges changes;
  if (log_->is_lost()) {
    changes = everything();
    static_cast<void>(log_->take());
  } else {
    changes = log_->take();
  }
  changes.now = order_.clock().now();
  return changes;
}

// A node comes after its parent.
TreeChanges PrefixTree::everything() const {
  TreeChanges all;
  all.is_restart = true;
  std::vector<const TreeNode*> nodes;
  for (const auto& [name, root] : roots_) push_unless_null(root->children, &nodes);
  while (!nodes.empty()) {
    const TreeNode* node = nodes.back();
    nodes.pop_back();
    const TreeNode* parent = node->parent;
    if (parent->is_root()) all.namespaces.push_back(*parent->namespace_);
    add_node(node, parent->is_root() ? kNothingBefore : reference(parent, parent->num_blocks - 1), &all);
    for (const TreeNode* next : {node->children, node->left, node->right}) push_unless_null(next, &nodes);
  }
  return all;
}

// `end` is where the fresh blocks are put; it is on the device as a whole, or a root.
void PrefixTree::log_inserted(const TreeNode* end, const TokenView& tokens, std::span<const int32_t> fresh) noexcept {
  if (!log_ || fresh.empty()) return;
  const int64_t before = end->is_root() ? kNothingBefore : end->device_ids.span().back();
  const int64_t num_tokens = static_cast<int64_t>(fresh.size()) * block_size_;
  log_->inserted(fresh, before, tokens.last(num_tokens), end->is_root() ? end->namespace_ : nullptr);
}

void PrefixTree::log_left(ChangeKind kind, const TreeNode* node, std::span<const int32_t> ids) noexcept {
  if (log_) log_->left(kind, ids, node->used_at >= log_begin_ ? node->used_at : 0);
}

}  // namespace kvpage
