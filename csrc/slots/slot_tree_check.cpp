// SlotTree::check_invariants: every invariant, by counting again all that the tree counts.
#include <sstream>
#include <stdexcept>
#include <unordered_set>

#include "slots/slot_tree.h"

namespace kvpage {
namespace {

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace

void SlotTree::check_invariants() const {
  std::lock_guard lock(mutex_);
  int64_t num_tokens = 0;
  check_node(root_);
  for (const auto& [key, node] : nodes_) {
    require(!node->is_root() && node->tokens.size() > 0, "a node has no edge");
    require(key == key_of(node.get()), "a node is not found by its first token");
    require(node->num_holders > 0 || node->num_pins > 0, "a node is neither held nor pinned");
    require(node->num_children != 1 || node->num_ends > 0 || node->holders.front(), "an edge is split for nothing");
    check_node(*node);
    num_tokens += node->tokens.size();
  }
  require(num_tokens == num_tokens_, num_tokens_, " tokens count, ", num_tokens, " are there");
  require(num_tokens <= max_capacity_ || !unpinned_.front(), "the tree is over its capacity and not all is pinned");
  check_list();
  check_holders();
}

void SlotTree::check_node(const SlotNode& node) const {
  int64_t num_pins = node.num_ends, num_holders = 0, num_children = 0;
  bool all_held = true;
  for (const SlotHolder* holder = node.holders.front(); holder; holder = node.holders.next(holder)) {
    require(holder->node == &node && !node.is_root(), "a holder's node is not where it is listed");
    ++num_holders;
  }
  for (const SlotNode* child = node.children.front(); child; child = node.children.next(child)) {
    require(child->parent == &node && nodes_.contains(key_of(child)), "a child is listed at another node");
    require(all_held || child->num_holders == 0, "a child with a holder comes after one without");
    all_held = child->num_holders > 0;
    num_pins += child->num_pins;
    num_holders += child->num_holders;
    ++num_children;
  }
  require(num_children == node.num_children, "a node counts ", node.num_children, " children of ", num_children);
  require(num_pins == node.num_pins, "a node counts ", node.num_pins, " pins of ", num_pins);
  require(num_holders == node.num_holders, "a node counts ", node.num_holders, " holders of ", num_holders);
}

void SlotTree::check_list() const {
  std::unordered_set<const SlotNode*> listed;
  for (const SlotNode* node = unpinned_.front(); node; node = unpinned_.next(node)) {
    require(listed.insert(node).second, "the list of unpinned nodes runs in a circle");
    require(node->num_pins == 0, "a pinned node is listed");
    require(!listed.contains(node->parent), "a node is listed after its parent");
  }
  for (const auto& entry : nodes_)
    require(listed.contains(entry.second.get()) == (entry.second->num_pins == 0), "an unpinned node is not listed");
}

void SlotTree::check_holders() const {
  require(static_cast<int64_t>(holders_.size()) == root_.num_holders, holders_.size(), " slots are known and ",
          root_.num_holders, " hold something");
  for (const auto& [slot, holder] : holders_)
    require(slot == holder.slot && holder.node, "slot ", slot, " is known and holds nothing");
}

}  // namespace kvpage
