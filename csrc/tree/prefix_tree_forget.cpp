// PrefixTree: blocks that are forgotten, in both tiers, and the companions that die with them.
#include <algorithm>

#include "base/check.h"
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

// A node's children go before it: they are put first before.
int64_t PrefixTree::put_first(const TokenView& tokens, std::string_view name, int64_t num_kept) {
  std::lock_guard lock(mutex_);
  check(num_kept >= 0, "num_kept must not be negative, got ", num_kept);
  TreeNode* root = find_root(name);
  if (!root) return 0;
  const Place place = walk(root, tokens, tokens.size() / block_size_);
  if (place.in_edge < place.node->num_blocks) return 0;
  const int64_t num_kept_blocks = num_kept / block_size_ + (num_kept % block_size_ > 0);
  const std::vector<TreeNode*> path = used_alone(place.node, place.num_blocks - num_kept_blocks);
  int64_t num_blocks = 0;
  order_.begin_use();
  for (TreeNode* node : path) {
    order_.remove(node);
    node->priority = kFirstToGo;
    order_.push_newest(node);
    num_blocks += node->num_blocks;
  }
  return num_blocks * block_size_;
}

int64_t PrefixTree::set_next_use(const TokenView& tokens, std::string_view name, double seconds) {
  std::lock_guard lock(mutex_);
  check(seconds >= 0 && seconds < kForever, "seconds must be between 0 and ", kForever, ", got ", seconds);
  TreeNode* root = find_root(name);
  if (!root) return 0;
  const Place place = walk(root, tokens, tokens.size() / block_size_);
  const bool is_whole = place.in_edge == place.node->num_blocks;
  const int64_t next_use = order_.clock().now() + static_cast<int64_t>(seconds * 1e9);
  for (TreeNode* node = is_whole ? place.node : place.node->parent; !node->is_root(); node = node->parent)
    order_.set_next_use(node, next_use);
  return (place.num_blocks - (is_whole ? 0 : place.in_edge)) * block_size_;
}

void PrefixTree::set_time(double seconds) {
  std::lock_guard lock(mutex_);
  check(seconds >= 0 && seconds < kForever, "seconds must be between 0 and ", kForever, ", got ", seconds);
  order_.set_time(static_cast<int64_t>(seconds * 1e9));
}

// Returns the nodes of the last `num_blocks` blocks before the end of `end`, from there up to the first that is pinned,
// goes on elsewhere, was used later, or was put first.
std::vector<TreeNode*> PrefixTree::used_alone(TreeNode* end, int64_t num_blocks) {
  std::vector<TreeNode*> path;
  uint64_t used_at = end->used_at;
  for (TreeNode* node = end; num_blocks > 0; node = node->parent) {
    const bool is_free = node->num_pins == 0 && node->num_children == (path.empty() ? 0 : 1);
    if (!is_free || node->priority == kFirstToGo || !EvictionOrder::of_one_use(used_at, node)) break;
    if (node->num_blocks > num_blocks) split(node, node->num_blocks - num_blocks);
    used_at = node->used_at;
    num_blocks -= node->num_blocks;
    path.push_back(node);
  }
  return path;
}

int64_t PrefixTree::drop_namespace(std::string_view name) {
  std::lock_guard lock(mutex_);
  TreeNode* root = find_root(name);
  if (!root) return 0;
  std::vector<TreeNode*> nodes, left{root->children};  // nodes: each after its parent
  while (!left.empty()) {
    TreeNode* node = left.back();
    left.pop_back();
    if (!node) continue;
    if (node->num_pins == 0) nodes.push_back(node);
    left.insert(left.end(), {node->left, node->right, node->children});
  }
  std::reverse(nodes.begin(), nodes.end());  // the upper half of a split comes after the lower, which is as old
  // By use, children are before their parents still. A policy that weighs nodes may weigh a parent less.
  const auto goes_first = [this](const TreeNode* a, const TreeNode* b) { return order_.before(a, b); };
  if (!order_.is_ranked()) std::stable_sort(nodes.begin(), nodes.end(), goes_first);
  // From here on nothing throws.
  const int64_t num_cached = num_cached_;
  for (TreeNode* node : nodes) forget_end(node, 0);  // with the last one the root is gone
  return num_cached - num_cached_;
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
  order_.forget(node, node->num_blocks - num_blocks);
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
  order_.leave_tree(node);
  arena_.give_back(node);
  --parent->num_children;
  if (parent->is_root()) drop_unused_root(parent);
}

// --- companions ---

void PrefixTree::give_companions(const Match& match, int64_t start, int64_t end) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  check(start >= 0 && start <= end && end <= match.num_blocks_, "start and end must be in order and at most ",
        match.num_blocks_, ", got ", start, " and ", end);
  // Calls visit(node, first block in it, last) for each edge of the path that has blocks in [start, end).
  const auto for_each_edge = [&](auto visit) {
    int64_t first = match.num_blocks_;
    for (TreeNode* node = match.end_; first > start; node = node->parent) {
      first -= node->num_blocks;
      const int64_t last = std::min<int64_t>(node->num_blocks, end - first);
      if (last > 0) visit(node, std::max<int64_t>(start - first, 0), last);
    }
  };
  const auto has = [](const TreeNode* node, int64_t block) {
    return block < node->companions.size() && node->companions.data()[block] != kNoBlock;
  };
  size_t num_lacking = 0;
  for_each_edge([&](TreeNode* node, int64_t block, int64_t last) {
    for (; block < last; ++block) num_lacking += !has(node, block);
  });
  if (num_lacking == 0) return;
  const size_t num_free = free_companions_.size();
  const size_t num_new = num_lacking > num_free ? num_lacking - num_free : 0;
  const size_t num_all = static_cast<size_t>(num_companions_) + num_new;
  free_companions_.reserve(num_all);
  dead_companions_.reserve(num_all);
  try {
    for_each_edge([&](TreeNode* node, int64_t, int64_t last) {
      node->companions.reserve(std::max<int64_t>(last - node->companions.size(), 0));
    });
  } catch (...) {  // gives the room back
    for_each_edge([](TreeNode* node, int64_t, int64_t) { node->companions.truncate(node->companions.size()); });
    throw;
  }
  // From here on nothing throws.
  for (size_t i = 0; i < num_new; ++i) free_companions_.push_back(num_companions_++);
  for_each_edge([&](TreeNode* node, int64_t block, int64_t last) {
    const int64_t num_more = std::max<int64_t>(last - node->companions.size(), 0);
    std::fill_n(node->companions.extend(num_more), num_more, kNoBlock);
    for (; block < last; ++block) {
      if (has(node, block)) continue;
      node->companions.set(block, free_companions_.back());
      free_companions_.pop_back();
    }
  });
}

// Of the node's blocks from the one at `begin` on, which are forgotten.
void PrefixTree::drop_companions(TreeNode* node, int64_t begin) noexcept {
  if (begin >= node->companions.size()) return;
  for (const int32_t companion : node->companions.span().subspan(static_cast<size_t>(begin)))
    if (companion != kNoBlock) dead_companions_.push_back(companion);
  node->companions.truncate(begin);
}

std::vector<int32_t> PrefixTree::dead_companions() const {
  std::lock_guard lock(mutex_);
  return dead_companions_;
}

void PrefixTree::free_companions(int64_t num_dead) {
  std::lock_guard lock(mutex_);
  const auto most = static_cast<int64_t>(dead_companions_.size());
  check(num_dead >= 0 && num_dead <= most, "num_dead must be between 0 and ", most, ", got ", num_dead);
  const auto end = dead_companions_.begin() + num_dead;
  free_companions_.insert(free_companions_.end(), dead_companions_.begin(), end);  // there is room
  dead_companions_.erase(dead_companions_.begin(), end);
}

}  // namespace kvpage
