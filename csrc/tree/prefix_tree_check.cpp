// PrefixTree::check_invariants: every invariant, by counting again all that the tree counts.
#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tree/prefix_tree.h"

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

void PrefixTree::check_invariants(std::optional<std::span<const int32_t>> owned_ids,
                                  std::optional<std::span<const int32_t>> owned_host_ids) {
  std::lock_guard lock(mutex_);
  check_nodes();
  check_tiers();
  check_companions();
  check_siblings();
  check_roots();
  check_order();
  check_blocks(*pool_, false, num_cached_, owned_ids);
  if (host_pool_) check_blocks(*host_pool_, true, num_host_cached_, owned_host_ids);
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
    require(node.num_blocks > 0, "a node has no block");
    require(node.priority <= node.parent->priority || node.parent->is_root(),
            "a node's priority is above its parent's");
    require(node.tokens.size() == node.num_blocks * block_size_, "an edge has ", node.tokens.size(), " tokens and ",
            node.num_blocks, " blocks");
    require(!is_wasteful(node.tokens) && !is_wasteful(node.device_ids) && !is_wasteful(node.host_ids) &&
                !is_wasteful(node.companions),
            "an edge keeps memory it has no use for");
    const TokenView tokens(node.tokens.data(), node.tokens.size());
    require(node.hash == children_.hash(node.parent->point, tokens, 0), "a node's hash is not that of its first block");
    require(children_.find(node.parent, tokens, 0) == &node, "a node is not found by its first block");
  });
  require(num_edges == children_.size(), "the child table has ", children_.size(), " entries for ", num_edges,
          " nodes");
  arena_.for_each([&](const TreeNode& node) {
    const Below& sum = below[&node];
    require(node.num_children == sum.num_children, "a node counts ", node.num_children, " children of ",
            sum.num_children);
    require(node.num_pins >= sum.num_pins, "a node has ", node.num_pins, " pins and its children ", sum.num_pins);
  });
}

void PrefixTree::check_tiers() {
  arena_.for_each([&](const TreeNode& node) {
    if (node.is_root()) return;
    require(node.num_device_blocks() <= node.num_blocks && node.host_ids.size() <= node.num_blocks,
            "an edge has more block ids than blocks");
    require(node.num_device_blocks() == 0 || node.parent->is_on_device(),
            "a block on the device follows one that is not");
    const auto host_ids = node.host_ids.span();
    require(host_ids.empty() || host_ids.back() != kNoBlock, "an edge's host ids end in none");
    int64_t num_host_blocks = 0;
    for (int64_t block = 0; block < node.num_blocks; ++block) {
      num_host_blocks += node.has_host_block(block);
      require(block < node.num_device_blocks() || node.has_host_block(block), "a block is in no tier");
    }
    require(num_host_blocks == node.num_host_blocks, "a node counts ", node.num_host_blocks, " host blocks of ",
            num_host_blocks);
  });
}

void PrefixTree::check_companions() {
  std::vector<int32_t> companions = free_companions_;
  companions.insert(companions.end(), dead_companions_.begin(), dead_companions_.end());
  arena_.for_each([&](const TreeNode& node) {
    require(node.companions.size() <= node.num_blocks, "an edge has more companions than blocks");
    for (const int32_t companion : node.companions.span())
      if (companion != kNoBlock) companions.push_back(companion);
  });
  std::sort(companions.begin(), companions.end());
  require(static_cast<int32_t>(companions.size()) == num_companions_, "there are ", companions.size(),
          " companions of ", num_companions_);
  for (int32_t i = 0; i < num_companions_; ++i)
    require(companions[static_cast<size_t>(i)] == i, "companion ", i, " is given twice, or lost");
}

// Every treap holds its parent's children, in order.
void PrefixTree::check_siblings() {
  arena_.for_each([&](const TreeNode& parent) {
    int64_t num_children = 0;
    const int32_t* before = nullptr;
    std::vector<const TreeNode*> above;
    require(!parent.children || !parent.children->above, "something is above the first of the siblings");
    for (const TreeNode* node = parent.children; node || !above.empty();) {
      if (node) {
        above.push_back(node);
        node = node->left;
        continue;
      }
      node = above.back();
      above.pop_back();
      ++num_children;
      const int32_t* tokens = node->tokens.data();
      require(node->is_live && node->parent == &parent, "a node is among another's children");
      require((node->left ? node->left->above == node : true) && (node->right ? node->right->above == node : true),
              "a sibling does not know what is above it");
      require(!before || std::lexicographical_compare(before, before + block_size_, tokens, tokens + block_size_),
              "siblings are out of order");
      before = tokens;
      node = node->right;
    }
    require(num_children == parent.num_children, "a node has ", parent.num_children, " children and keeps ",
            num_children, " in order");
  });
}

void PrefixTree::check_roots() {
  size_t num_roots = 0;
  int64_t num_pins = 0;
  arena_.for_each([&](const TreeNode& node) {
    if (!node.is_root()) return;
    ++num_roots;
    num_pins += node.num_pins;
    require(node.num_blocks == 0 && node.tokens.size() == 0, "a root has an edge");
    require(node.num_pins > 0 || node.num_children > 0, "an unused namespace was kept");
    require(node.namespace_ && find_root(*node.namespace_) == &node, "a root is not found by its namespace");
  });
  require(num_roots == roots_.size(), "there are ", num_roots, " roots for ", roots_.size(), " namespaces");
  require(num_pins == num_matches_, "the roots have ", num_pins, " pins for ", num_matches_, " matches");
}

void PrefixTree::check_order() {
  std::unordered_set<const TreeNode*> listed;
  int64_t num_blocks = 0, num_host_blocks = 0;
  for (int list = 0; list < EvictionOrder::kNumLists; ++list) {
    const TreeNode* older = nullptr;
    const TreeNode* on_host = order_.oldest_on_host(list);
    const TreeNode* on_device = nullptr;
    for (const TreeNode* node = order_.oldest(list); node; older = node, node = order_.newer(node)) {
      require(listed.insert(node).second, "the list of unpinned nodes runs in a circle");
      require(node->is_live && !node->is_root(), "a listed node is not in the tree");
      require(node->num_pins == 0, "a pinned node is listed");
      require(order_.list_of(node) == list, "a node is in another list");
      require(node->use.older == older, "the list's links disagree");
      require(!listed.contains(node->parent), "a node is listed after its parent");
      if (node->num_host_blocks > 0 && !order_.is_ranked()) {
        require(node == on_host, "the order of use on the host is not the order of use");
        on_host = order_.newer_on_host(on_host);
      }
      if (!on_device && node->num_device_blocks() > 0 && !order_.is_ranked()) on_device = node;
      num_blocks += node->num_device_blocks();
      num_host_blocks += node->num_host_blocks;
    }
    require(!on_host, "a node without host blocks is listed among those that have some");
    require(on_device == order_.first_on_device(list), "the first node on the device is another one");
  }
  arena_.for_each([&](const TreeNode& node) {
    if (node.is_root()) return;
    require(listed.contains(&node) == (node.num_pins == 0), "an unpinned node is not listed");
  });
  if (order_.is_ranked()) check_ranks(listed);
  require(num_blocks == num_evictable_, num_evictable_, " blocks count as evictable, ", num_blocks, " are");
  require(num_host_blocks == num_host_evictable_, num_host_evictable_, " host blocks count as evictable, ",
          num_host_blocks, " are");
}

// A listed node may go from a tier if it has blocks there and none of its children has.
void PrefixTree::check_ranks(const std::unordered_set<const TreeNode*>& listed) {
  std::unordered_map<const TreeNode*, int32_t> device_children, host_children;
  arena_.for_each([&](const TreeNode& node) {
    if (node.is_root()) return;
    device_children[node.parent] += node.num_device_blocks() > 0;
    host_children[node.parent] += node.num_host_blocks > 0;
    require(node.start == node.parent->start + node.parent->num_blocks, "a node does not know its depth");
  });
  arena_.for_each([&](const TreeNode& node) {
    require(node.num_device_children == device_children[&node] && node.num_host_children == host_children[&node],
            "a node counts other children in a tier than it has");
    if (node.is_root()) return;
    const bool is_listed = listed.contains(&node);
    require(RankedOrder::is_ranked_on_device(&node) ==
                (is_listed && node.num_device_blocks() > 0 && node.num_device_children == 0),
            "a node that may leave the device is not ranked, or one that may not is");
    require(RankedOrder::is_ranked_on_host(&node) ==
                (is_listed && node.num_host_blocks > 0 && node.num_host_children == 0),
            "a node that may leave the host is not ranked, or one that may not is");
  });
}

void PrefixTree::check_blocks(const BlockPool& pool, bool is_host, int64_t num_counted,
                              std::optional<std::span<const int32_t>> owned_ids) {
  std::unordered_set<int32_t> cached;
  int64_t num_cached = 0;
  arena_.for_each([&](const TreeNode& node) {
    for (int32_t id : (is_host ? node.host_ids : node.device_ids).span()) {
      if (id == kNoBlock) continue;
      ++num_cached;
      cached.insert(id);
      require(pool.all_cached({&id, 1}), "a cached block's reference is not the tree's alone");
    }
  });
  require(num_cached == num_counted, num_counted, " blocks count as cached, ", num_cached, " are");
  require(static_cast<int64_t>(cached.size()) == num_cached, "a block is cached twice");
  if (!owned_ids) return;

  std::unordered_map<int32_t, int64_t> owned;
  for (int32_t id : *owned_ids) ++owned[id];
  for (const auto& [id, num_references] : owned) {
    require(!cached.contains(id), "block ", id, " is owned and cached");
    require(pool.ref_count(id) == num_references, "block ", id, " has ", pool.ref_count(id), " references and ",
            num_references, " owners");
  }
  const int64_t total = pool.num_free() + num_cached + static_cast<int64_t>(owned.size());
  require(total == pool.num_blocks(), pool.num_free(), " free + ", num_cached, " cached + ", owned.size(),
          " owned blocks are not ", pool.num_blocks());
}

}  // namespace kvpage
