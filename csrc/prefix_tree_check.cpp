// PrefixTree::check_invariants: every invariant, by counting again what the tree keeps count of.
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "prefix_tree.h"

namespace kvpage {
namespace {

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

bool is_wasteful(const Int32Run& run) { return run.capacity() > 2 * run.size() + 16; }

}  // namespace

void PrefixTree::check_invariants(std::optional<std::span<const int32_t>> owned_ids) {
  std::lock_guard lock(mutex_);
  check_nodes();
  check_roots();
  check_list();
  check_blocks(owned_ids);
}

void PrefixTree::check_nodes() {
  struct Below {
    int64_t num_pins = 0;
    int64_t num_children = 0;
  };
  std::unordered_map<const TreeNode*, Below> below;
  int64_t num_edges = 0;
  arena_.for_each([&](const TreeNode& node) {
    if (node.is_root()) return;
    ++num_edges;
    below[node.parent].num_pins += node.num_pins;
    below[node.parent].num_children += 1;
    require(node.parent->is_live, "a node's parent is gone");
    require(node.num_blocks() > 0, "a node has no block");
    require(node.tokens.size() == node.num_blocks() * block_size_, "an edge has ", node.tokens.size(), " tokens and ",
            node.num_blocks(), " blocks");
    require(!is_wasteful(node.tokens) && !is_wasteful(node.device.block_ids), "an edge keeps memory it has no use for");
    const TokenView tokens(node.tokens.data(), node.tokens.size());
    require(node.hash == children_.hash(node.parent, tokens, 0), "a node's hash is not that of its first block");
    require(children_.find(node.parent, tokens, 0) == &node, "a node is not found by its first block");
  });
  require(num_edges == children_.size(), "the child table has ", children_.size(), " entries for ", num_edges, " nodes");
  arena_.for_each([&](const TreeNode& node) {
    const Below& sum = below[&node];
    require(node.num_children == sum.num_children, "a node counts ", node.num_children, " children of ",
            sum.num_children);
    require(node.num_pins >= sum.num_pins, "a node has ", node.num_pins, " pins and its children ", sum.num_pins);
  });
}

void PrefixTree::check_roots() {
  size_t num_roots = 0;
  int64_t num_pins = 0;
  arena_.for_each([&](const TreeNode& node) {
    if (!node.is_root()) return;
    ++num_roots;
    num_pins += node.num_pins;
    require(node.num_blocks() == 0 && node.tokens.size() == 0, "a root has an edge");
    require(node.num_pins > 0 || node.num_children > 0, "an unused namespace was kept");
    require(node.namespace_ && find_root(*node.namespace_) == &node, "a root is not found by its namespace");
  });
  require(num_roots == roots_.size(), "there are ", num_roots, " roots for ", roots_.size(), " namespaces");
  require(num_pins == num_matches_, "the roots have ", num_pins, " pins for ", num_matches_, " matches");
}

void PrefixTree::check_list() {
  std::unordered_set<const TreeNode*> listed;
  int64_t num_blocks = 0;
  const TreeNode* older = nullptr;
  for (const TreeNode* node = unpinned_.oldest(); node; node = unpinned_.newer(node)) {
    require(listed.insert(node).second, "the list of unpinned nodes runs in a circle");
    require(node->is_live && !node->is_root(), "a listed node is not in the tree");
    require(node->num_pins == 0, "a pinned node is listed");
    require(node->device.older == older, "the list's links disagree");
    require(!listed.contains(node->parent), "a node is listed after its parent");
    num_blocks += node->num_blocks();
    older = node;
  }
  arena_.for_each([&](const TreeNode& node) {
    if (node.is_root()) return;
    require(listed.contains(&node) == (node.num_pins == 0), "an unpinned node is not listed");
  });
  require(num_blocks == num_evictable_, num_evictable_, " blocks count as evictable, ", num_blocks, " are");
}

void PrefixTree::check_blocks(std::optional<std::span<const int32_t>> owned_ids) {
  std::unordered_set<int32_t> cached;
  int64_t num_cached = 0;
  arena_.for_each([&](const TreeNode& node) {
    const auto ids = node.device.block_ids.span();
    num_cached += node.num_blocks();
    cached.insert(ids.begin(), ids.end());
    require(pool_->all_cached(ids), "a cached block's reference is not the tree's alone");
  });
  require(num_cached == num_cached_, num_cached_, " blocks count as cached, ", num_cached, " are");
  require(static_cast<int64_t>(cached.size()) == num_cached, "a block is cached twice");
  if (!owned_ids) return;

  std::unordered_map<int32_t, int64_t> owned;
  for (int32_t id : *owned_ids) ++owned[id];
  for (const auto& [id, num_references] : owned) {
    require(!cached.contains(id), "block ", id, " is owned and cached");
    require(pool_->ref_count(id) == num_references, "block ", id, " has ", pool_->ref_count(id), " references and ",
            num_references, " owners");
  }
  const int64_t total = pool_->num_free() + num_cached + static_cast<int64_t>(owned.size());
  require(total == pool_->num_blocks(), pool_->num_free(), " free + ", num_cached, " cached + ", owned.size(),
          " owned blocks are not ", pool_->num_blocks());
}

}  // namespace kvpage
