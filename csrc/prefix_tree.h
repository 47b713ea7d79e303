// PrefixTree: which tokens have their K and V in which blocks. A radix tree whose edges are runs of whole blocks.
//
//      namespace ""                         block_size 2; each edge: tokens / block ids
//        |-- [1 2 3 4 / 7 8] --+-- [5 6 / 9]
//        |                     `-- [5 7 9 9 / 2 3]        a match of 1 2 3 4 5 7 9 ... ends inside this edge after
//        `-- [8 8 / 5]                                    one block: the edge is split there, so that pins hold
//      namespace "lora-1"                                 exactly what was matched
//        `-- [1 2 / 6]
//
// Tokens are compared, not digests: no collision can hand out another prompt's cache.
//
// Pins. Every live Match pins the nodes from its end to its root. A pinned node stays; an unpinned one stands in the
// list of last use (LruList) and can be evicted.
//
// A split leaves the lower half at the node's address, because matches point at the node where they end; the upper
// half takes over the pins. It cannot be seen from outside.
//
// Blocks. The tree holds the only reference on each cached block (BlockPool::adopt).
//
// Every call holds the tree's mutex. One that throws has changed nothing that can be seen.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "block_pool.h"
#include "child_table.h"
#include "lru_list.h"
#include "token_view.h"
#include "tree_node.h"

namespace kvpage {

class PrefixTree;

// A pinned path of a tree: from a namespace's root to the end of a node. Keeps the tree alive. It has to be given to
// PrefixTree::release, or to insert as `after`; one that is merely forgotten stays pinned as long as the tree lives.
class Match {
 public:
  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_tokens() const;
  PrefixTree& tree() const { return *tree_; }

 private:
  friend class PrefixTree;
  Match(std::shared_ptr<PrefixTree> tree, TreeNode* end, int64_t num_blocks)
      : tree_(std::move(tree)), end_(end), num_blocks_(num_blocks) {}

  std::shared_ptr<PrefixTree> tree_;
  TreeNode* end_;  // null once released
  int64_t num_blocks_;
};

class PrefixTree : public std::enable_shared_from_this<PrefixTree> {
 public:
  // Throws InvalidArgument unless block_size is in [1, 2**31 - 1]. `hash_mask` is for tests, see ChildTable.
  PrefixTree(std::shared_ptr<BlockPool> pool, int64_t block_size, uint64_t hash_mask = ~uint64_t{0});
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  int64_t block_size() const { return block_size_; }
  int64_t num_cached() const;     // blocks
  int64_t num_evictable() const;  // blocks of unpinned nodes
  int64_t num_nodes() const;      // edges
  int64_t num_matches() const;    // live ones

  // Pins the longest cached run of whole blocks that leaves at least one token over. InvalidArgument if the first
  // block that is not cached holds an id outside of 32 bits; later tokens are not read.
  Match match(const TokenView& tokens, std::string_view name);

  // Another Match of the same path. InvalidArgument if `match` is released or another tree's.
  Match pin(const Match& match);

  // Unpins the path, from its end to the root; what nobody pins any more becomes the most recently used.
  // InvalidArgument if `match` is released or another tree's.
  void release(Match& match);
  bool is_released(const Match& match) const;

  // Caches tokens[i * block_size, ...) in block_ids[i], below the end of `after` or the namespace's root. Pins the
  // whole path; `after` is consumed. Where the tokens are cached already, the caller's block is released and the
  // tree's stands in the path (it may also be named itself). InvalidArgument if the numbers of tokens and blocks do
  // not agree, a token does not fit into 32 bits, `after` is released, another tree's, or comes with a namespace, or
  // a block is not the caller's alone.
  Match insert(const TokenView& tokens, std::span<const int32_t> block_ids, std::string_view name, Match* after);

  // Frees up to that many blocks, least recently used first; of an edge, its last first. Returns how many.
  int64_t evict(int64_t num_blocks);

  // Frees all that is not pinned; returns the number of blocks.
  int64_t clear();

  // The path's block ids from the block at `start` on; `ids` has room for num_blocks() - start. InvalidArgument if
  // `match` is released.
  void copy_block_ids(const Match& match, int64_t start, std::span<int32_t> ids) const;

  // Throws std::runtime_error that names the broken invariant. With the references that the caller holds (an id once
  // for each), also that free, cached and owned blocks make up the pool, which then serves this tree alone.
  void check_invariants(std::optional<std::span<const int32_t>> owned_ids);

 private:
  // A point in the tree: after `in_edge` blocks of the node's edge, `num_blocks` below where the walk began.
  struct Place {
    TreeNode* node;
    int64_t in_edge;
    int64_t num_blocks;
  };

  struct NameHash {
    using is_transparent = void;
    size_t operator()(std::string_view name) const { return std::hash<std::string_view>()(name); }
  };

  void check_live(const Match& match, const char* name) const;
  TreeNode* find_root(std::string_view name) const;
  TreeNode* make_root(std::string_view name);
  void drop_unused_root(TreeNode* root) noexcept;

  Place walk(TreeNode* from, const TokenView& tokens, int64_t num_blocks) const;
  TreeNode* end_node_at(const Place& place);
  TreeNode* split(TreeNode* node, int64_t num_upper_blocks);

  void pin_path(TreeNode* end, const TreeNode* stop) noexcept;
  void unpin_path(TreeNode* end) noexcept;
  Match pinned(TreeNode* end, int64_t num_blocks);

  Match insert_below(Match& base, const TokenView& tokens, std::span<const int32_t> block_ids);
  std::vector<int32_t> duplicates(const TreeNode* from, const TreeNode* end, std::span<const int32_t> block_ids) const;
  void adopt(TreeNode* target, std::span<const int32_t> fresh, std::span<const int32_t> surplus);
  void append_edge(TreeNode* node, const TokenView& tokens, std::span<const int32_t> fresh) noexcept;
  void link_child(TreeNode* parent, TreeNode* child) noexcept;

  int64_t evict_locked(int64_t num_blocks) noexcept;
  void prefetch_victims() const noexcept;
  void truncate(TreeNode* node, int64_t num_blocks) noexcept;
  void remove_leaf(TreeNode* node) noexcept;

  void check_nodes();
  void check_roots();
  void check_list();
  void check_blocks(std::optional<std::span<const int32_t>> owned_ids);

  const std::shared_ptr<BlockPool> pool_;
  const int64_t block_size_;

  mutable std::mutex mutex_;
  NodeArena arena_;
  ChildTable children_;
  LruList<&TreeNode::device> unpinned_;
  std::unordered_map<std::string, TreeNode*, NameHash, std::equal_to<>> roots_;
  int64_t num_cached_ = 0;
  int64_t num_evictable_ = 0;
  int64_t num_matches_ = 0;  // live ones
};

inline int64_t Match::num_tokens() const { return num_blocks_ * tree_->block_size(); }

}  // namespace kvpage
