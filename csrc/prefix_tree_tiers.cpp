// PrefixTree: what leaves the device, what leaves the host, and what comes back.
#include <algorithm>
#include <new>
#include <unordered_map>
#include <utility>

#include "check.h"
#include "prefix_tree.h"

namespace kvpage {
class PrefixTree::Demotions {
 public:
  // False, and nothing changed, if there is no memory.
  bool add(int32_t device_id, int32_t host_id) noexcept try {
    pairs_.emplace_back(device_id, host_id);
    if (is_indexed_) {
      try {
        index_.insert_or_assign(host_id, pairs_.size() - 1);
      } catch (const std::bad_alloc&) {
        pairs_.pop_back();
        return false;
      }
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  // The host block is taken from whom it was given to. Where memory is lacking the list is searched instead.
  void forget(int32_t host_id) noexcept {
    if (!is_indexed_) try_index();
    if (is_indexed_) {
      const auto found = index_.find(host_id);
      if (found == index_.end()) return;
      pairs_[found->second].first = kNoBlock;
      index_.erase(found);
      return;
    }
    for (TierPair& pair : pairs_)
      if (pair.second == host_id) pair.first = kNoBlock;
  }

  std::vector<TierPair> take() {
    std::erase_if(pairs_, [](const TierPair& pair) { return pair.first == kNoBlock; });
    return std::move(pairs_);
  }

 private:
  void try_index() noexcept try {
    for (size_t i = 0; i < pairs_.size(); ++i) index_.insert_or_assign(pairs_[i].second, i);
    is_indexed_ = true;
  } catch (const std::bad_alloc&) {
    index_.clear();
  }

  std::vector<TierPair> pairs_;
  std::unordered_map<int32_t, size_t> index_;  // by host block; only once one is forgotten
  bool is_indexed_ = false;
};

// --- promotion ---

int64_t PrefixTree::num_device_blocks(const Match& match) const {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  int64_t num_blocks = match.num_blocks_;
  for (const TreeNode* node = match.end_; !node->is_on_device(); node = node->parent)
    num_blocks -= node->num_blocks - node->num_device_blocks();
  return num_blocks;
}

std::vector<TierPair> PrefixTree::promote(const Match& match, std::span<const int32_t> block_ids) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  const std::vector<TreeNode*> path = host_only_path(match.end_);
  int64_t num_host_only = 0;
  for (const TreeNode* node : path) num_host_only += node->num_blocks - node->num_device_blocks();
  check(static_cast<int64_t>(block_ids.size()) <= num_host_only, "block_ids must be at most one for each of ",
        num_host_only, " blocks that are on the host only, got ", block_ids.size());
  std::vector<TierPair> pairs;
  pairs.reserve(block_ids.size());
  try {
    for (TreeNode* node : path) node->device_ids.reserve(node->num_blocks - node->num_device_blocks());
    pool_->adopt(block_ids, {});
  } catch (...) {
    for (TreeNode* node : path) node->device_ids.truncate(node->num_device_blocks());
    throw;
  }
  fill_device(path, block_ids, &pairs);
  return pairs;
}

void PrefixTree::trim(Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  TreeNode* end = match.end_;
  int64_t num_blocks = match.num_blocks_;
  for (; !end->is_root() && end->num_device_blocks() == 0; end = end->parent) num_blocks -= end->num_blocks;
  if (!end->is_on_device()) {
    num_blocks -= end->num_blocks - end->num_device_blocks();
    end = split(end, end->num_device_blocks());
  }
  unpin_path(std::exchange(match.end_, end), end);
  match.num_blocks_ = num_blocks;
}

std::vector<TierPair> PrefixTree::write_out(const Match& match, int64_t min_hits) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  check(min_hits >= 0, "min_hits must not be negative, got ", min_hits);
  std::vector<TreeNode*> path;
  for (TreeNode* node = match.end_; !node->is_root(); node = node->parent) path.push_back(node);
  Demotions written;
  for (size_t i = path.size(); host_pool_ && i-- > 0;) {
    if (path[i]->num_hits < min_hits) continue;
    for (int64_t block = 0; block < path[i]->num_device_blocks(); ++block)
      if (!path[i]->has_host_block(block) && !give_host_block(path[i], block, &written)) return written.take();
  }
  return written.take();
}

// --- leaving the device ---

int64_t PrefixTree::evict(int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  return evict_locked(num_blocks, nullptr);
}

std::pair<int64_t, std::vector<TierPair>> PrefixTree::demote(int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  Demotions demotions;
  const int64_t num_freed = evict_locked(num_blocks, host_pool_ ? &demotions : nullptr);
  return {num_freed, demotions.take()};
}

int64_t PrefixTree::clear() {
  std::lock_guard lock(mutex_);
  const int64_t num_freed = evict_locked(num_evictable_, nullptr);
  evict_host_locked(num_host_evictable_, nullptr);
  return num_freed;
}

// Victims are strewn over memory. What the next eviction will touch is fetched ahead, and the node after it, through
// which the same will be done then: among 50,000 leaves an eviction costs two thirds. Always inlined, since the
// compiler drops a call of a function that does nothing but prefetch.
[[gnu::always_inline]] inline void PrefixTree::prefetch_victims() const noexcept {
  const TreeNode* next = order_.first_on_device();
  if (!next) return;
  __builtin_prefetch(next->tokens.data());
  __builtin_prefetch(next->device_ids.data());
  children_.prefetch(next->hash);
  if (const TreeNode* second = order_.newer(next)) {
    __builtin_prefetch(second);
    __builtin_prefetch(reinterpret_cast<const char*>(second) + 64);
  }
}

// The first unpinned node on the device has nothing below it on the device: its descendants would stand before it, and
// a pinned one would pin it.
int64_t PrefixTree::evict_locked(int64_t num_blocks, Demotions* demotions) noexcept {
  int64_t num_left = num_blocks;
  while (num_left > 0) {
    TreeNode* node = order_.first_on_device();
    if (!node) break;
    if (node->num_host_blocks == 0 && node->num_children == 0 && !demotions) {  // nothing of it will be left to keep
      const int64_t num_evicted = std::min(num_left, node->num_device_blocks());
      forget_end(node, node->num_blocks - num_evicted);
      num_left -= num_evicted;
    } else {
      leave_device(node, demotions);
      --num_left;
    }
  }
  prefetch_victims();
  return num_blocks - num_left;
}

// Takes the node's last device block. Making room on the host may shorten the node, but not to less than that block.
void PrefixTree::leave_device(TreeNode* node, Demotions* demotions) noexcept {
  const int64_t block = node->num_device_blocks() - 1;
  if (!node->has_host_block(block) && (!demotions || !give_host_block(node, block, demotions))) {
    forget_below(node);
    forget_end(node, block);
    return;
  }
  pool_->drop(node->device_ids.span().last(1));
  --num_cached_;
  --num_evictable_;
  node->device_ids.truncate(block);
  if (block == 0) order_.leave_device(node);
}

// False if there is no room on the host, none that can be made, or no memory for the entry.
bool PrefixTree::give_host_block(TreeNode* node, int64_t block, Demotions* demotions) noexcept {
  int32_t id;
  if (!find_host_block(id, demotions)) return false;
  Int32Run& ids = node->host_ids;
  const int64_t size_before = ids.size(), lacking = std::max<int64_t>(block + 1 - size_before, 0);
  try {
    ids.reserve(lacking);
  } catch (const std::bad_alloc&) {
    host_pool_->drop({&id, 1});
    return false;
  }
  if (!demotions->add(node->device_ids.data()[block], id)) {
    ids.truncate(size_before);
    host_pool_->drop({&id, 1});
    return false;
  }
  std::fill_n(ids.extend(lacking), lacking, kNoBlock);
  ids.set(block, id);
  ++num_host_cached_;
  const bool is_first = node->num_host_blocks++ == 0;
  if (node->num_pins > 0) return true;
  ++num_host_evictable_;
  if (is_first) order_.enter_host(node);
  return true;
}

bool PrefixTree::find_host_block(int32_t& id, Demotions* demotions) noexcept {
  if (host_pool_->adopt_free(id)) return true;
  return evict_host_locked(1, demotions) > 0 && host_pool_->adopt_free(id);
}

// --- leaving the host, and the tree ---

int64_t PrefixTree::evict_host(int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  return evict_host_locked(num_blocks, nullptr);
}

// The first unpinned node on the host has nothing below it that is on the host only.
int64_t PrefixTree::evict_host_locked(int64_t num_blocks, Demotions* demotions) noexcept {
  int64_t num_left = num_blocks;
  for (; num_left > 0; --num_left) {
    TreeNode* node = order_.first_on_host();
    if (!node) break;
    const auto last = node->host_ids.span().last(1);
    if (demotions) demotions->forget(last[0]);
    if (!node->is_on_device()) {
      forget_end(node, node->num_blocks - 1);
      continue;
    }
    host_pool_->drop(last);
    --num_host_cached_;
    --num_host_evictable_;
    node->shorten_host_ids(node->host_ids.size() - 1);
    if (--node->num_host_blocks == 0) order_.leave_host(node);
  }
  return num_blocks - num_left;
}

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
      forget_end(at, 0);
      at = parent;
    }
  }
}

// Shortens an unpinned node without children to its first `num_blocks` blocks, in both tiers; to none removes it.
void PrefixTree::forget_end(TreeNode* node, int64_t num_blocks) noexcept {
  const auto device_ids = node->device_ids.span();
  if (num_blocks < node->num_device_blocks()) {
    const auto dropped = device_ids.subspan(static_cast<size_t>(num_blocks));
    pool_->drop(dropped);
    num_cached_ -= static_cast<int64_t>(dropped.size());
    num_evictable_ -= static_cast<int64_t>(dropped.size());
  }
  const int64_t num_host_before = node->num_host_blocks;
  for (int64_t block = node->host_ids.size(); block-- > num_blocks;) {
    if (!node->has_host_block(block)) continue;
    host_pool_->drop(node->host_ids.span().subspan(static_cast<size_t>(block), 1));
    --node->num_host_blocks;
  }
  num_host_cached_ -= num_host_before - node->num_host_blocks;
  num_host_evictable_ -= num_host_before - node->num_host_blocks;
  if (num_host_before > 0 && node->num_host_blocks == 0) order_.leave_host(node);
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
