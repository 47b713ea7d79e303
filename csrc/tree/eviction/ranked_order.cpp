#include "tree/eviction/ranked_order.h"

#include <algorithm>

namespace kvpage {
namespace {

int list_of(const TreeNode* node) { return node->priority - kFirstToGo; }

}  // namespace

void RankedOrder::list(TreeNode* node, int64_t now) noexcept {
  if (node->next_use <= now) node->next_use = 0;
  if (node->added_at == 0) node->added_at = static_cast<int64_t>(node->used_at);
  classify(node);
  set_flag(node, kListed, true);
  node->num_listed_blocks = node->num_blocks;
  policy_->listed(node->facts(), node->num_blocks);
  rank(node);
}

void RankedOrder::unlist(TreeNode* node) noexcept {
  unrank(node);
  set_flag(node, kListed, false);
  policy_->listed(node->facts(), -node->num_listed_blocks);
}

// Asks for a place among the ranks, which the node is not in.
void RankedOrder::classify(TreeNode* node) noexcept {
  const EvictionFacts facts = node->facts();
  node->rank_class = static_cast<uint8_t>(policy_->class_of(facts));
  node->rank_key = policy_->key_of(facts);
}

// Takes the node out of both tiers' ranks.
void RankedOrder::unrank(TreeNode* node) noexcept {
  const auto list = static_cast<size_t>(list_of(node));
  if (node->rank_flags & kRankedOnDevice) on_device_[list].erase(node);
  if (node->rank_flags & kRankedOnHost) on_host_[list].erase(node);
  set_flag(node, kRankedOnDevice, false);
  set_flag(node, kRankedOnHost, false);
}

// Puts the node where it may go, and takes it out where it may not.
void RankedOrder::rank(TreeNode* node) noexcept {
  if (!(node->rank_flags & kListed)) return;
  const auto list = static_cast<size_t>(list_of(node));
  const auto apply = [&](auto& ranks, Flag flag, bool may_go) {
    const bool is_ranked = node->rank_flags & flag;
    if (may_go && !is_ranked) ranks.insert(node);
    if (!may_go && is_ranked) ranks.erase(node);
    set_flag(node, flag, may_go);
  };
  apply(on_device_[list], kRankedOnDevice, node->num_device_blocks() > 0 && node->num_device_children == 0);
  apply(on_host_[list], kRankedOnHost, node->num_host_blocks > 0 && node->num_host_children == 0);
}

void RankedOrder::refresh(TreeNode* node, bool has_device, bool has_host, int64_t now) noexcept {
  TreeNode* parent = node->parent;
  const bool had_device = node->rank_flags & kHasDevice, had_host = node->rank_flags & kHasHost;
  set_flag(node, kHasDevice, has_device);
  set_flag(node, kHasHost, has_host);
  parent->num_device_children += has_device - had_device;
  parent->num_host_children += has_host - had_host;
  rank(node);  // one that leaves the tree is listed no more
  if (parent->is_root()) return;
  const bool has_left = (had_device && !has_device) || (had_host && !has_host);
  // Whoever comes for the child comes for the parent.
  if (has_left && node->next_use > parent->next_use && parent->next_use <= now) {
    unrank(parent);
    parent->next_use = node->next_use;
    if (parent->rank_flags & kListed) classify(parent);
  }
  rank(parent);
}

void RankedOrder::split(TreeNode* lower, TreeNode* upper) noexcept {
  TreeNode* parent = upper->parent;
  const auto set_has = [](TreeNode* node) {
    set_flag(node, kHasDevice, node->num_device_blocks() > 0);
    set_flag(node, kHasHost, node->num_host_blocks > 0);
  };
  parent->num_device_children -= (lower->rank_flags & kHasDevice) > 0;
  parent->num_host_children -= (lower->rank_flags & kHasHost) > 0;
  set_has(lower);
  set_has(upper);
  parent->num_device_children += (upper->rank_flags & kHasDevice) > 0;
  parent->num_host_children += (upper->rank_flags & kHasHost) > 0;
  upper->num_device_children = (lower->rank_flags & kHasDevice) > 0;
  upper->num_host_children = (lower->rank_flags & kHasHost) > 0;
  upper->next_use = lower->next_use;
  upper->added_at = lower->added_at;
  if (!parent->is_root()) rank(parent);  // its last child with host blocks may be the lower one
  if (!(lower->rank_flags & kListed)) return;
  upper->rank_class = lower->rank_class;
  upper->rank_key = lower->rank_key;
  set_flag(upper, kListed, true);
  upper->num_listed_blocks = std::min(upper->num_blocks, lower->num_listed_blocks);
  lower->num_listed_blocks -= upper->num_listed_blocks;
  rank(lower);
  rank(upper);
}

void RankedOrder::set_next_use(TreeNode* node, int64_t next_use, int64_t now) noexcept {
  if (node->next_use > now && node->next_use <= next_use) return;
  const bool is_listed = node->rank_flags & kListed;
  if (is_listed) unlist(node);
  node->next_use = next_use;
  if (is_listed) list(node, now);
}

bool RankedOrder::before(const TreeNode* a, const TreeNode* b, int64_t now) const {
  if (list_of(a) != list_of(b)) return list_of(a) < list_of(b);
  const double worth_a = policy_->worth(a->facts(), now), worth_b = policy_->worth(b->facts(), now);
  return worth_a != worth_b ? worth_a < worth_b : RankTree<TreeNode, &TreeNode::device_rank>::less(a, b);
}

}  // namespace kvpage
