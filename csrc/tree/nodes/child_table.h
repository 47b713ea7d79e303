// ChildTable: finds a node's child by the tokens of the child's first block; one open-addressing table for a tree.
//
//      | hash, node |    .    | hash, node | hash, node |    .    |      linear probing, at most two thirds full
//
// The hash covers the parent's point and the tokens, so a parent with 50,000 children costs no more than one with two.
// Equal hashes are told apart by parent and tokens. Removal shifts back the entries that had to step aside: no
// tombstones.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/token_view.h"
#include "tree/nodes/tree_node.h"

namespace kvpage {

class ChildTable {
 public:
  // `hash_mask` is for tests: few bits make collisions.
  ChildTable(int64_t block_size, uint64_t seed, uint64_t hash_mask);

  int64_t size() const { return size_; }
  uint64_t hash(uint64_t point, const TokenView& tokens, int64_t start) const {
    return tokens.hash(start, block_size_, seed_ ^ point) & hash_mask_;
  }

  // The point of a namespace's root: the same whenever there is one.
  uint64_t root_point(std::string_view name) const;

  // The child of `parent` whose first block is the block of `tokens` at `start`, or null.
  TreeNode* find(const TreeNode* parent, const TokenView& tokens, int64_t start) const;

  // Makes room for one more entry. Throws std::bad_alloc and changes nothing.
  void reserve_one();

  // Enters the node under its `hash`. Requires room, and that no sibling has the same first block.
  void insert(TreeNode* node) noexcept;
  void erase(const TreeNode* node) noexcept;

  void prefetch(uint64_t hash) const { __builtin_prefetch(&entries_[home(hash)]); }

 private:
  struct Entry {
    uint64_t hash = 0;
    TreeNode* node = nullptr;
  };

  size_t next(size_t slot) const { return (slot + 1) & (entries_.size() - 1); }
  size_t home(uint64_t hash) const { return hash & (entries_.size() - 1); }

  int64_t block_size_;
  uint64_t seed_;
  uint64_t hash_mask_;
  std::vector<Entry> entries_;  // a power of two of them
  int64_t size_ = 0;
};

}  // namespace kvpage
