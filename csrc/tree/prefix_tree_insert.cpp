// PrefixTree: insertion.
#include <algorithm>

#include "base/check.h"
#include "tree/prefix_tree.h"

namespace kvpage {

Match PrefixTree::insert(const TokenView& tokens, std::span<const int32_t> block_ids, std::string_view name,
                         Match* after, int priority) {
  std::lock_guard lock(mutex_);
  const auto num_blocks = static_cast<int64_t>(block_ids.size());
  check(tokens.size() == num_blocks * block_size_, "tokens must fill the blocks: ", num_blocks, " blocks of ",
        block_size_, " need ", num_blocks * block_size_, " tokens, got ", tokens.size());
  tokens.check_fits(0, tokens.size());
  check_priority(priority);
  if (after) {
    check_live(*after, "after");
    check(name.empty(), "namespace must be left out with after, which has its own");
    check(priority == 0, "priority must be left out with after, which has its own");
    check(after->end_->is_on_device(), "after must be on the device, promote or trim it first");
    return insert_below(*after, tokens, block_ids);
  }
  TreeNode* root = find_root(name);
  Match base = pinned(root ? root : make_root(name), 0, priority);
  try {
    return insert_below(base, tokens, block_ids);
  } catch (...) {
    --num_matches_;
    unpin_path(base.end_, nullptr);
    throw;
  }
}

// block_ids, by the state of their tokens in the tree:
//
//      | on the device: surplus | host only: filled | nothing: fresh |
//                               | taken                              |
Match PrefixTree::insert_below(Match& base, const TokenView& tokens, std::span<const int32_t> block_ids) {
  const Place place = walk(base.end_, tokens, static_cast<int64_t>(block_ids.size()));
  const auto num_present = static_cast<size_t>(place.num_blocks);
  const auto num_filled = static_cast<size_t>(num_host_only(place));
  const auto taken = block_ids.subspan(num_present - num_filled);
  const auto fresh = block_ids.subspan(num_present);
  const auto surplus = duplicates(base.end_, place, block_ids.first(num_present));
  if (place.in_edge < place.node->num_blocks) pool_->check_adoptable(taken, surplus);  // a split is not undone
  TreeNode* end = end_node_at(place);
  const std::vector<TreeNode*> filled = host_only_path(end);
  std::vector<TierPair> pairs;
  pairs.reserve(num_filled);

  // A leaf without other pins can grow; one that ends a second match must stay as long as that match, and one of a
  // higher priority would hand it on.
  const bool grows = !end->is_root() && end->num_children == 0 && end->num_pins == (end == base.end_ ? 1 : 0) &&
                     end->priority <= base.priority_;
  auto child = fresh.empty() || grows ? NodeArena::NodePtr(nullptr, {&arena_}) : arena_.make();
  if (child) children_.reserve_one();
  TreeNode* target = child ? child.get() : end;
  adopt(target, fresh, surplus, filled, taken);
  // From here on nothing throws.
  pin_path(end, base.end_, base.priority_);
  fill_device(filled, taken.first(num_filled), &pairs);
  log_inserted(end, tokens, fresh);
  append_edge(target, tokens, fresh);
  if (child) {
    child->num_pins = 1;
    child->priority = static_cast<int8_t>(base.priority_);
    link_child(end, child.release());
  }
  if (!fresh.empty()) order_.fill(target);
  base.end_ = nullptr;
  return Match(base.tree_, target, base.num_blocks_ + static_cast<int64_t>(block_ids.size()), base.priority_);
}

// How many blocks of the path, at its end, are on the host alone.
int64_t PrefixTree::num_host_only(const Place& place) const {
  int64_t count = 0, in_edge = place.in_edge;
  for (const TreeNode* node = place.node; node->num_device_blocks() < in_edge;
       node = node->parent, in_edge = node->num_blocks)
    count += in_edge - node->num_device_blocks();
  return count;
}

// Returns the ids, up to the path's last block on the device, that differ from the cached ones, in order.
std::vector<int32_t> PrefixTree::duplicates(const TreeNode* from, const Place& place,
                                            std::span<const int32_t> block_ids) const {
  std::vector<int32_t> surplus;
  auto stop = block_ids.size();
  int64_t in_edge = place.in_edge;
  for (const TreeNode* node = place.node; node != from; node = node->parent, in_edge = node->num_blocks) {
    const auto on_device = static_cast<size_t>(std::min(in_edge, node->num_device_blocks()));
    const auto cached = node->device_ids.span().first(on_device);
    stop -= static_cast<size_t>(in_edge);
    const auto named = block_ids.subspan(stop, cached.size());
    if (std::equal(cached.begin(), cached.end(), named.begin())) continue;
    for (size_t i = cached.size(); i-- > 0;)
      if (named[i] != cached[i]) surplus.push_back(named[i]);
  }
  std::reverse(surplus.begin(), surplus.end());
  return surplus;
}

// Room first, at the target and in the nodes that are filled; then the blocks, so that nothing is left to fail.
void PrefixTree::adopt(TreeNode* target, std::span<const int32_t> fresh, std::span<const int32_t> surplus,
                       std::span<TreeNode* const> filled, std::span<const int32_t> taken) {
  const auto num_fresh = static_cast<int64_t>(fresh.size());
  try {
    for (TreeNode* node : filled) node->device_ids.reserve(node->num_blocks - node->num_device_blocks());
    target->tokens.reserve(num_fresh * block_size_);
    target->device_ids.reserve(target->num_blocks - target->num_device_blocks() + num_fresh);
    pool_->adopt(taken, surplus);
  } catch (...) {  // gives the room back
    for (TreeNode* node : filled) node->device_ids.truncate(node->num_device_blocks());
    target->tokens.truncate(target->tokens.size());
    target->device_ids.truncate(target->num_device_blocks());
    throw;
  }
}

// Returns the nodes from the first that is not wholly on the device to the end; none if all are.
std::vector<TreeNode*> PrefixTree::host_only_path(TreeNode* end) {
  std::vector<TreeNode*> path;
  for (TreeNode* node = end; !node->is_on_device(); node = node->parent) path.push_back(node);
  std::reverse(path.begin(), path.end());
  return path;
}

// Requires room, in `pairs` too, and that the nodes are pinned.
void PrefixTree::fill_device(std::span<TreeNode* const> path, std::span<const int32_t> block_ids,
                             std::vector<TierPair>* pairs) noexcept {
  for (TreeNode* node : path) {
    const int64_t begin = node->num_device_blocks();
    const int64_t count = std::min<int64_t>(node->num_blocks - begin, static_cast<int64_t>(block_ids.size()));
    const auto ids = block_ids.first(static_cast<size_t>(count));
    std::copy(ids.begin(), ids.end(), node->device_ids.extend(count));
    const int32_t* host_ids = node->host_ids.data() + begin;
    for (int64_t i = 0; i < count; ++i) pairs->emplace_back(host_ids[i], ids[i]);
    for (int64_t i = 0; log_ && i < count; ++i) log_->add(ChangeKind::kPromoted, ids[i], host_ids[i]);
    block_ids = block_ids.subspan(ids.size());
    num_cached_ += count;
    order_.fill(node);
  }
}

void PrefixTree::append_edge(TreeNode* node, const TokenView& tokens, std::span<const int32_t> fresh) noexcept {
  if (fresh.empty()) return;
  const auto num_fresh = static_cast<int64_t>(fresh.size());
  const int64_t num_tokens = num_fresh * block_size_;
  node->point = ++last_point_;
  tokens.copy_to(tokens.size() - num_tokens, num_tokens, node->tokens.extend(num_tokens));
  std::copy(fresh.begin(), fresh.end(), node->device_ids.extend(num_fresh));
  node->num_blocks += static_cast<int32_t>(num_fresh);
  node->added_at = 0;  // its last blocks go first, and are new
  num_cached_ += num_fresh;
}

}  // namespace kvpage
