// SlotTree: which slots hold which token sequences from their first token on. A radix tree, split at any token.
//
//      root                                         slot 4 holds 1 2 3 5 6, slot 0 holds 1 2 3, slot 7 holds 1 2 3 9
//        |-- [1 2 3] {0} --+-- [5 6] {4}
//        |                 `-- [9] {7}              find(1 2 3 5 8) is 4 tokens, in slot 4
//        `-- [8 8 8] {2}                            find(1 2 9) is 2 tokens, in any slot below the point
//
// A slot holds a whole sequence, so every slot at or below the point where a prompt leaves the tree has the prefix.
// A slot is in one place only: inserting it again moves it.
//
// The tree is as small as it can be: every node but the root has a holder, or a pin ends there, or it has two
// children. A split edge is joined again when the cause of the split goes.
//
// Pins. A pin keeps the path from its end to the root; one is taken by each insert and each pin, and given back by
// release, which names the same tokens.
//
// Eviction. `max_capacity` bounds the tokens in the tree; a shared prefix counts once. Unpinned nodes stand in one
// list by last use, a node always before its ancestors, so that the oldest is a leaf: it loses as many tokens from its
// end as are too many. Its slots still hold what is left of the path. Where all is pinned the tree goes over its
// capacity, and comes back to it with the releases.
//
// Every call holds the tree's mutex. One that throws InvalidArgument has changed nothing; after std::bad_alloc an edge
// may stay split where nothing ends.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/token_view.h"
#include "slots/slot_allocator.h"
#include "slots/slot_node.h"

namespace kvpage {

// A prefix that a slot holds. Without tokens there is no slot.
struct SlotMatch {
  int64_t num_tokens = 0;
  int64_t slot = 0;
  int64_t version = 0;
};

class SlotTree {
 public:
  // Throws InvalidArgument if max_capacity is negative.
  explicit SlotTree(int64_t max_capacity);
  SlotTree(const SlotTree&) = delete;
  SlotTree& operator=(const SlotTree&) = delete;

  int64_t max_capacity() const { return max_capacity_; }
  int64_t num_tokens() const;
  int64_t num_over() const;   // tokens above max_capacity, all of them pinned
  int64_t num_slots() const;  // that hold something
  int64_t num_nodes() const;  // edges: what a path's cost grows with
  int64_t num_pins() const;   // taken and not given back

  // The slot holds the tokens now, and nothing else; their path is pinned. Evicts down to the capacity, and returns
  // num_over(). InvalidArgument for no tokens, a token outside of 32 bits, or a negative slot.
  int64_t insert(const TokenView& tokens, int64_t slot, int64_t version);

  // The longest prefix that a slot holds. With an allocator a slot counts only while its version is the allocator's;
  // one that is found stale is withdrawn for good. InvalidArgument if the allocator has no such slot.
  SlotMatch find(const TokenView& tokens, const SlotAllocator* allocator);

  // Finds as `find` does, and pins the result, to be released by those tokens. No tokens take no pin.
  SlotMatch pin(const TokenView& tokens, const SlotAllocator* allocator);

  // Gives back one pin that ends exactly at the end of the tokens. InvalidArgument if there is none.
  void release(const TokenView& tokens);

  // The slot holds nothing any more; false if it did not.
  bool withdraw(int64_t slot);

  // Throws std::runtime_error that names the broken invariant. O(tree).
  void check_invariants() const;

 private:
  // A point in the tree: after `in_edge` tokens of the node's edge, `num_tokens` below the root.
  struct Place {
    SlotNode* node;
    int64_t in_edge;
    int64_t num_tokens;
  };

  struct ChildKey {
    const SlotNode* parent;
    int64_t first_token;
    bool operator==(const ChildKey&) const = default;
  };

  struct ChildHash {
    uint64_t seed;
    size_t operator()(const ChildKey& key) const;
  };

  static ChildKey key_of(const SlotNode* node) { return {node->parent, node->tokens.data()[0]}; }

  Place walk(const TokenView& tokens, bool held_only);
  SlotNode* node_at(const Place& place);
  SlotNode* end_node(const TokenView& tokens);
  SlotNode* add_leaf(SlotNode* parent, const TokenView& tokens, int64_t start);
  SlotNode* split(SlotNode* node, int64_t at);
  void join_only_child(SlotNode* node) noexcept;
  void erase_leaf(SlotNode* leaf) noexcept;
  void tidy(SlotNode* node) noexcept;

  Place find_locked(const TokenView& tokens, const SlotAllocator* allocator);
  SlotMatch match_at(const Place& place) const;
  static SlotHolder* holder_below(const SlotNode* node);
  void hold(SlotHolder& holder, SlotNode* end, int64_t version) noexcept;
  void drop_holder(SlotHolder* holder) noexcept;
  void add_holders(SlotNode* node, int64_t count) noexcept;

  void pin_path(SlotNode* end) noexcept;
  void unpin_path(SlotNode* end) noexcept;
  void touch_path(SlotNode* end) noexcept;
  void evict() noexcept;
  void evict_leaf(SlotNode* leaf) noexcept;

  void check_node(const SlotNode& node) const;
  void check_list() const;
  void check_holders() const;

  const int64_t max_capacity_;
  mutable std::mutex mutex_;
  SlotNode root_;
  std::unordered_map<ChildKey, std::unique_ptr<SlotNode>, ChildHash> nodes_;  // owns all but the root
  std::map<int64_t, SlotHolder> holders_;  // by slot; in order, so that the last one is known
  LinkedList<SlotNode, &SlotNode::ages> unpinned_;                            // oldest first
  int64_t num_tokens_ = 0;
};

}  // namespace kvpage
