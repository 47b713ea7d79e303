// TreeNode: one edge of the prefix tree with the point where it ends; NodeArena, which owns all of them.
//
//      parent                      a namespace's root has no edge; every other node has a whole block at least
//        |  blocks      0  1  2  3  4         num_blocks = 5
//        |  tokens     [.. .. .. .. ..]       [num_blocks * block_size]
//        |  device_ids [ 7  2  9      ]       of the first blocks: blocks leave the device from the end
//        |  host_ids   [ 4  -  1  8  3]       of any block, of each that is not on the device; -: kNoBlock, never last
//        |  companions [ -  0  5      ]       of any block: the number of what others keep beside it
//      node
//      /  \                        children: a treap by their first block's tokens, and ChildTable
//
// The fields that eviction and matching touch in a device-only tree are in the first two cache lines.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/int32_run.h"
#include "pool/eviction/cost_policy.h"
#include "pool/eviction/rank_tree.h"

namespace kvpage {

struct TreeNode;

constexpr int32_t kNoBlock = -1;
constexpr int kNumPriorities = 8;
constexpr int8_t kFirstToGo = -1;  // below every priority; the next match on the node ends it

// Neighbours in an LruList.
struct LruLinks {
  TreeNode* older = nullptr;
  TreeNode* newer = nullptr;
};

struct alignas(64) TreeNode {
  TreeNode* parent = nullptr;  // null for a root, and only there
  uint64_t point = 0;          // names the path up to the node's end; another one when the end moves
  uint64_t hash = 0;           // of (the parent's point, first block), as ChildTable has it
  Int32Run tokens;
  int32_t num_pins = 0;  // matches that end here or below; a root counts all of its namespace
  int32_t num_children = 0;

  Int32Run device_ids;
  LruLinks use;  // among all unpinned nodes
  uint64_t used_at = 0;  // by the clock of EvictionOrder
  int32_t num_blocks = 0;
  int32_t num_hits = 0;  // matches that found it
  int8_t priority = 0;   // the highest that a match on it, or below, had; kFirstToGo once it was put first
  bool is_live = false;  // false while the arena keeps it for later

  alignas(64) Int32Run host_ids;
  LruLinks host_use;  // among the unpinned nodes with host blocks
  int32_t num_host_blocks = 0;

  TreeNode* children = nullptr;  // the top of the treap of its children
  TreeNode* left = nullptr;      // in the treap of its siblings
  TreeNode* right = nullptr;
  TreeNode* above = nullptr;
  const std::string* namespace_ = nullptr;  // of a root: the key that the tree knows it by
  Int32Run companions;

  // Of RankedOrder; 0 where the policy is lru.
  RankLinks<TreeNode> device_rank;  // among the nodes that may leave the device now
  RankLinks<TreeNode> host_rank;    // and the host
  int64_t next_use = 0;  // when it is expected, by the clock of EvictionOrder in nanoseconds; 0: not known
  int64_t added_at = 0;  // when it was listed first since it has grown
  int64_t rank_key = 0;  // as the policy says, like its class
  int32_t num_device_children = 0;  // with blocks on the device
  int32_t num_host_children = 0;    // and on the host
  int32_t num_listed_blocks = 0;    // as the policy counts it
  int32_t start = 0;                // blocks before it on its path
  uint8_t rank_class = 0;
  uint8_t rank_flags = 0;

  EvictionFacts facts() const {
    return {.used_at = static_cast<int64_t>(used_at),
            .added_at = added_at,
            .next_use = next_use,
            .num_hits = num_hits,
            .cost_kind = EvictionCosts::kind_of_depth(start),
            .rank_class = rank_class};
  }
  bool is_root() const { return parent == nullptr; }
  int64_t num_device_blocks() const { return device_ids.size(); }
  bool is_on_device() const { return device_ids.size() == num_blocks; }
  bool has_host_block(int64_t block) const { return block < host_ids.size() && host_ids.data()[block] != kNoBlock; }

  // To the first `size` entries, and then to those up to the last block.
  void shorten_host_ids(int64_t size) noexcept {
    while (size > 0 && host_ids.data()[size - 1] == kNoBlock) --size;
    host_ids.truncate(size);
  }
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
