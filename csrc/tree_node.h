// TreeNode: one edge of the prefix tree with the point where it ends; NodeArena, which owns all of them.
//
//      parent                          a namespace's root has no edge; every other node has a whole block at least
//        |  tokens   [num_blocks * block_size]
//        |  device   [num_blocks] block ids, and the place in the list of last use
//      node
//      /  \        children are not listed here: ChildTable finds them
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "int32_run.h"

namespace kvpage {

struct TreeNode;

// A node's share in one tier. There is one a tier, so that a host tier is a second member like `device`.
struct TierPart {
  Int32Run block_ids;
  TreeNode* older = nullptr;  // neighbours in the tier's LruList, while the node is unpinned
  TreeNode* newer = nullptr;
};

struct alignas(64) TreeNode {
  TreeNode* parent = nullptr;                // null for a root, and only there
  const std::string* namespace_ = nullptr;   // of a root: the key that the tree knows it by
  uint64_t hash = 0;                         // of (parent, first block), as ChildTable has it
  Int32Run tokens;
  TierPart device;
  int32_t num_pins = 0;      // matches that end here or below; a root counts all of its namespace
  int32_t num_children = 0;
  bool is_live = false;      // false while the arena keeps it for later

  bool is_root() const { return parent == nullptr; }
  int64_t num_blocks() const { return device.block_ids.size(); }
};

// Owns nodes in slabs and never moves one. A node that is given back keeps its address and loses its memory.
class NodeArena {
  struct GiveBack {
    NodeArena* arena;
    void operator()(TreeNode* node) const noexcept { arena->give_back(node); }
  };

 public:
  using NodePtr = std::unique_ptr<TreeNode, GiveBack>;

  // Throws std::bad_alloc. The node goes back unless it is released from the pointer.
  NodePtr make() {
    if (!free_) add_slab();
    TreeNode* node = free_;
    free_ = std::exchange(node->parent, nullptr);
    node->is_live = true;
    return NodePtr(node, GiveBack{this});
  }

  void give_back(TreeNode* node) noexcept {
    *node = TreeNode();
    node->parent = std::exchange(free_, node);
  }

  template <typename Visit>
  void for_each(Visit visit) {
    for (auto& slab : slabs_)
      for (int i = 0; i < kSlab; ++i)
        if (slab[i].is_live) visit(slab[i]);
  }

 private:
  void add_slab() {
    slabs_.push_back(std::make_unique<TreeNode[]>(kSlab));
    for (int i = kSlab; i-- > 0;) give_back(&slabs_.back()[i]);
  }

  static constexpr int kSlab = 64;
  std::vector<std::unique_ptr<TreeNode[]>> slabs_;
  TreeNode* free_ = nullptr;  // linked through `parent`
};

}  // namespace kvpage
