// PrefixTree: finds the blocks that hold the K and V of tokens. A radix tree whose edges are runs of whole blocks.
//
//      namespace ""                         block_size 2; each edge: tokens / block ids
//        |-- [1 2 3 4 / 7 8] --+-- [5 6 / 9]
//        |                     `-- [5 7 9 9 / 2 3]        a match of 1 2 3 4 5 7 9 ... ends inside this edge after
//        `-- [8 8 / 5]                                    one block: the edge is split there, so that pins hold
//      namespace "lora-1"                                 exactly the match
//        `-- [1 2 / 6]
//
// Tokens are compared, not digests: no collision can hand out another prompt's cache.
//
// Two tiers. A block may be on the device, on the host, or in both. On every path those on the device come first:
//
//      d d d dh dh h h h              d: device only   dh: both, needs no copy to leave the device   h: host only
//
// The tree moves no bytes. It returns the copies to make as pairs of block ids; the caller orders these copies, one
// list after the other, before anything else is written.
//
// Pins. Every live Match pins the nodes from its end to its root. A pinned node stays as it is; an unpinned one is
// in the order of last use (EvictionOrder) and loses its blocks from its end.
//
// A split leaves the lower half at the node's address, because matches point at the node where they end; the upper
// half takes over the pins. It cannot be seen from outside.
//
// Blocks. The tree holds the only reference on each cached block (BlockPool::adopt).
//
// Companions. What others keep beside a cached block, such as a window's block or a state, they keep under a number
// that the tree gives to the block. It stays the block's in whichever tier, and is found with it. With the block it
// dies: it is given to no other block before its owners have learnt that.
//
// Every call holds the tree's mutex. One that throws has changed nothing that can be seen.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/token_view.h"
#include "pool/block_pool.h"
#include "tree/evicted_blocks.h"
#include "tree/eviction/eviction_order.h"
#include "tree/nodes/child_table.h"
#include "tree/nodes/sibling_index.h"
#include "tree/nodes/tree_node.h"
#include "tree/tree_entry.h"
#include "tree/tree_log.h"

namespace kvpage {

class PrefixTree;

// From one tier's block to the other's.
using TierPair = std::pair<int32_t, int32_t>;

// A pinned path of a tree: from a namespace's root to the end of a node. Keeps the tree alive. It has to be given to
// PrefixTree::release, or to insert as `after`; one that is merely forgotten stays pinned as long as the tree lives.
class Match {
 public:
  Match() = default;  // of no tree: a place for another
  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_tokens() const;
  int priority() const { return priority_; }
  PrefixTree& tree() const { return *tree_; }

 private:
  friend class PrefixTree;
  Match(std::shared_ptr<PrefixTree> tree, TreeNode* end, int64_t num_blocks, int priority)
      : tree_(std::move(tree)), end_(end), num_blocks_(num_blocks), priority_(priority) {}

  std::shared_ptr<PrefixTree> tree_;
  TreeNode* end_ = nullptr;  // null once released
  int64_t num_blocks_ = 0;
  int priority_ = 0;
};

// Blocks that have left and entered the tiers, since the tree was made.
struct TreeCounts {
  int64_t num_evicted = 0;   // from the device
  int64_t num_demoted = 0;   // of these, copied to the host for it
  int64_t num_written = 0;   // copied to the host before
  int64_t num_promoted = 0;  // from the host to the device
  int64_t num_host_evicted = 0;
};

// The part that a match shares with the block that follows it: the first tokens of a block of another path, which is
// pinned.
struct PartMatch {
  Match match;
  int64_t num_tokens = 0;  // at least 1, fewer than a block's
  int32_t block_id = 0;
  bool is_on_device = false;  // otherwise block_id is the host's
};

class PrefixTree : public std::enable_shared_from_this<PrefixTree> {
 public:
  // Throws InvalidArgument unless 0 < block_size < 2^31, and if the two pools are one. Without a host pool there is
  // only the device tier. `hash_mask` is for tests, see ChildTable. `eviction`: as of make_eviction_policy.
  PrefixTree(std::shared_ptr<BlockPool> pool, int64_t block_size, std::shared_ptr<BlockPool> host_pool = nullptr,
             uint64_t hash_mask = ~uint64_t{0}, std::string_view eviction = "lru");
  virtual ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  int64_t block_size() const { return block_size_; }
  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  const std::string& eviction() const { return eviction_; }
  bool has_host_tier() const { return host_pool_ != nullptr; }
  int64_t num_cached() const;          // device blocks
  int64_t num_evictable() const;       // device blocks of unpinned nodes
  int64_t num_host_cached() const;     // host blocks
  int64_t num_host_evictable() const;  // host blocks of unpinned nodes
  int64_t num_nodes() const;           // edges
  int64_t num_matches() const;         // live ones
  TreeCounts counts() const;

  // Pins the longest cached run of whole blocks, in whichever tier, that leaves at least `num_left_over` tokens over.
  // The path's priority becomes at least `priority`. InvalidArgument if that is not in [0, kNumPriorities), if
  // num_left_over is negative, or if the first block that is not cached holds an id outside of 32 bits; later tokens
  // are not read. `is_hit`: whether it counts as a hit of the blocks that it finds.
  Match match(const TokenView& tokens, std::string_view name, int priority = 0, int64_t num_left_over = 1,
              bool is_hit = true);

  // Counts a hit of the path, for a match that has not counted as one. InvalidArgument as for `release`.
  void count_hit(const Match& match);

  // The longest part of the block after `match` that the first block of a path below it shares with `tokens`, which are
  // those of the whole prompt; as many of them are left over as for `match`. None if not even one token is shared.
  std::optional<PartMatch> match_part(const Match& match, const TokenView& tokens, int64_t num_left_over = 1);

  // Returns how many device blocks no other match pins. Releasing these matches, each given once, makes them evictable.
  // Throws InvalidArgument if one is released or another tree's.
  int64_t num_pinned_only_by(std::span<const Match* const> matches);

  // Returns another Match of the same path. Throws InvalidArgument if `match` is released or another tree's.
  Match pin(const Match& match);

  // Returns the match itself; what is left behind is released. InvalidArgument as for `release`.
  Match take(Match& match);

  // Unpins the path, from its end to the root; nodes without pins become the most recently used.
  // InvalidArgument if `match` is released or another tree's.
  void release(Match& match);
  bool is_released(const Match& match) const;

  // Returns how many of the path's blocks are on the device: the first ones.
  int64_t num_device_blocks(const Match& match) const;

  // Gives device blocks to the first host-only blocks of the path, one for each of `block_ids`, which become the
  // tree's: the (host, device) pairs to copy. InvalidArgument for more ids than such blocks, and for an id that is not
  // the caller's alone.
  std::vector<TierPair> promote(const Match& match, std::span<const int32_t> block_ids);

  // Shortens the match to its part on the device; the rest becomes the most recently used.
  void trim(Match& match);

  // Shortens the match to its first `num_blocks` blocks; the rest becomes the most recently used. InvalidArgument for
  // more than it has.
  void shorten(Match& match, int64_t num_blocks);

  // Gives host blocks to device blocks of the path, from its start on, as far as there is room or unpinned blocks on
  // the host make some: the (device, host) pairs to copy. Only of nodes that `min_hits` matches have found.
  std::vector<TierPair> write_out(const Match& match, int64_t min_hits);

  // Takes the path's blocks off the device that this match alone pins, from its end back to the first block that
  // another path goes on from, and gives host blocks to those that have none, as far as there is room or unpinned
  // blocks on the host make some. The path stays pinned. Returns the (device, host) pairs to copy before the device
  // blocks are written.
  std::vector<TierPair> send_out(const Match& match);

  // Caches tokens[i * block_size, ...) in block_ids[i], below the end of `after` or the namespace's root. Pins the
  // whole path; `after` is consumed. Where the tokens are on the device already, the caller's block is released and the
  // tree's is in the path (the caller may also name it); where they are on the host only, the caller's block becomes
  // their device block. InvalidArgument if the numbers of tokens and blocks do not agree, a token does not fit into 32
  // bits, `after` is released, another tree's, not wholly on the device, or comes with a namespace or a priority, or a
  // block is not the caller's alone.
  Match insert(const TokenView& tokens, std::span<const int32_t> block_ids, std::string_view name, Match* after,
               int priority = 0);

  // Frees up to that many device blocks, lowest priority and least recently used first; of an edge, its last first.
  // A block without a host block is forgotten, with the host-only blocks below it. Returns how many.
  int64_t evict(int64_t num_blocks);

  // Evicts, and gives host blocks to those that have none, making room on the host as evict_host does. Also returns the
  // (device, host) pairs to copy before the device blocks are written. A block without room is forgotten.
  std::pair<int64_t, std::vector<TierPair>> demote(int64_t num_blocks);

  // Frees up to that many host blocks. Copies of blocks that are on the device go first, the most recently used first,
  // which the device will keep longest. The others go as evict does, and are forgotten. Returns how many.
  int64_t evict_host(int64_t num_blocks);

  // Forgets the blocks of `tokens` from the last cached one up to the first that is pinned or that another path goes on
  // from. Returns how many tokens' worth of blocks.
  int64_t drop(const TokenView& tokens, std::string_view name);

  // Puts the blocks of `tokens` behind the first `num_kept` tokens before all others in the order of eviction, from the
  // last cached one up to the first that others need: that is pinned, that another path goes on from, or that was used
  // after the last one was. A match on one, or below, ends it. Their priority is forgotten. Returns how many tokens'
  // worth of blocks. InvalidArgument if num_kept is negative.
  int64_t put_first(const TokenView& tokens, std::string_view name, int64_t num_kept);

  // Tells that the path of `tokens`, as far as it is cached in whole edges, is expected to be used in so many seconds.
  // An earlier use that another has told counts instead, until its time is over. Only a policy that weighs nodes heeds
  // it. Returns how many tokens that are. InvalidArgument unless 0 <= seconds < kForever.
  static constexpr double kForever = 1e9;
  int64_t set_next_use(const TokenView& tokens, std::string_view name, double seconds);

  // For simulations: the tree's clock stands still at so many seconds, until the next call. InvalidArgument as above.
  void set_time(double seconds);

  // Forgets all blocks of a namespace that are not pinned, in both tiers, children before their parents; returns the
  // number of device blocks.
  int64_t drop_namespace(std::string_view name);

  // Frees all that is not pinned, in both tiers, and forgets what was evicted; returns the number of device blocks.
  int64_t clear();

  // The path's device block ids from the block at `start` on; `ids` has room for num_blocks() - start. InvalidArgument
  // if `match` is released or not wholly on the device.
  void copy_block_ids(const Match& match, int64_t start, std::span<int32_t> ids) const;

  // The path's blocks from the one at `start` on, in three rows: their ids in each tier, and their companions, with
  // kNoBlock where there is none. `rows` has room for 3 * (num_blocks() - start). InvalidArgument if `match` is
  // released.
  void copy_path(const Match& match, int64_t start, std::span<int32_t> rows) const;

  // Gives a companion to each of the path's blocks in [start, end) that has none. InvalidArgument if `match` is
  // released, or they are not in order within it.
  void give_companions(const Match& match, int64_t start, int64_t end);

  // Returns the companions of blocks that were forgotten, in the order in which they were.
  std::vector<int32_t> dead_companions() const;

  // From now on the first `num_dead` of these may be given to other blocks. InvalidArgument if they are not as many.
  void free_companions(int64_t num_dead);

  // The edges, `limit` at most, of all namespaces or of one: in the order of their names and tokens, each after the
  // edge that it goes on from. InvalidArgument if the limit is negative.
  std::vector<TreeEntry> entries(int64_t limit, std::optional<std::string_view> name = std::nullopt) const;

  // How far `tokens` are cached, and whether the next block is known to have been evicted. Nothing is pinned, and
  // nothing counts as used.
  PathLook look(const TokenView& tokens, std::string_view name) const;

  // Device blocks that are not in use, and that a match of a prompt, with the part of a block that it shares, would
  // pin: the path, and the rest of the edge with the part. One token is left to compute.
  int64_t num_held(const TokenView& tokens, std::string_view name) const;

  // The namespaces from `begin` on, `limit` at most, in the order of their bytes.
  std::vector<std::string> names(int64_t limit, std::string_view begin = {}) const;

  // The edges that most matches have found, `limit` at most, of all namespaces or of one, the hottest first: each comes
  // after the edge that it goes on from. Of each, the first `max_tokens` of its own tokens. A tree of more than
  // kMostSeen edges is not read whole, but its tops and what was used last. InvalidArgument for a negative number.
  static constexpr int64_t kMostSeen = 4096;
  std::vector<HotPrefix> hottest(int64_t limit, int64_t max_tokens,
                                 std::optional<std::string_view> name = std::nullopt) const;

  // Follows the changes of blocks from now on, in a log of at most that many bytes; 0 ends it. The first answer of
  // take_changes is the whole tree. InvalidArgument if negative.
  void log_changes(int64_t max_bytes);

  // Returns the changes since the last call, in order. The first answer, and one after changes were lost, is all that
  // is cached, as a restart. Throws InvalidArgument if no log is kept.
  TreeChanges take_changes();

  // Makes the next answer a restart.
  void lose_changes();

  // Throws std::runtime_error that names the broken invariant. With the references that the caller holds (an id once
  // for each), also that free, cached and owned blocks make up the pools, which then serve this tree alone.
  void check_invariants(std::optional<std::span<const int32_t>> owned_ids,
                        std::optional<std::span<const int32_t>> owned_host_ids = std::nullopt);

 private:
  // A point in the tree: after `in_edge` blocks of the node's edge, `num_blocks` below where the walk began.
  struct Place {
    TreeNode* node;
    int64_t in_edge;
    int64_t num_blocks;
  };

  // Pairs that one call has made. A host block that is evicted and given away again takes its first pair with it.
  class Demotions;

  void check_live(const Match& match, const char* name) const;
  static void copy_rows(const TreeNode* end, int64_t num_blocks, int64_t start, std::span<int32_t> rows);
  void drop_companions(TreeNode* node, int64_t begin) noexcept;
  void shorten_locked(Match& match, int64_t num_blocks);
  static void check_priority(int priority);
  static void check_left_over(int64_t num_left_over);
  TreeNode* find_root(std::string_view name) const;
  TreeNode* make_root(std::string_view name);
  void drop_unused_root(TreeNode* root) noexcept;

  Place walk(TreeNode* from, const TokenView& tokens, int64_t num_blocks) const;
  TreeNode* end_node_at(const Place& place);
  TreeNode* split(TreeNode* node, int64_t num_upper_blocks);

  void pin_path(TreeNode* end, const TreeNode* stop, int priority) noexcept;
  void unpin_path(TreeNode* end, const TreeNode* stop) noexcept;
  Match pinned(TreeNode* end, int64_t num_blocks, int priority);
  static void count_hit_locked(TreeNode* end) noexcept;
  void list(TreeNode* node) noexcept;
  void unlist(TreeNode* node) noexcept;

  Match insert_below(Match& base, const TokenView& tokens, std::span<const int32_t> block_ids);
  int64_t num_host_only(const Place& place) const;
  std::vector<int32_t> duplicates(const TreeNode* from, const Place& place, std::span<const int32_t> block_ids) const;
  void adopt(TreeNode* target, std::span<const int32_t> fresh, std::span<const int32_t> surplus,
             std::span<TreeNode* const> filled, std::span<const int32_t> fill);
  void append_edge(TreeNode* node, const TokenView& tokens, std::span<const int32_t> fresh) noexcept;
  void link_child(TreeNode* parent, TreeNode* child) noexcept;
  static std::vector<TreeNode*> host_only_path(TreeNode* end);
  void fill_device(std::span<TreeNode* const> path, std::span<const int32_t> block_ids,
                   std::vector<TierPair>* pairs) noexcept;

  int64_t evict_locked(int64_t num_blocks, Demotions* demotions) noexcept;
  void leave_device(TreeNode* node, int64_t num_blocks) noexcept;
  int64_t send_end_out(TreeNode* node, Demotions* sent) noexcept;
  int64_t move_to_host(TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept;
  void make_room_before(const TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept;
  bool give_host_block(TreeNode* node, int64_t block, Demotions* demotions) noexcept;
  bool set_host_block(TreeNode* node, int64_t block, int32_t id, Demotions* demotions) noexcept;
  TreeNode* newest_copy() const noexcept;
  int64_t drop_copies(TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept;
  int64_t evict_host_locked(int64_t num_blocks, Demotions* demotions) noexcept;
  int64_t leave_host(TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept;
  void drop_host(TreeNode* node, int64_t begin) noexcept;
  std::vector<TreeNode*> used_alone(TreeNode* end, int64_t num_blocks);
  void forget_below(TreeNode* node) noexcept;
  void evict_end(TreeNode* node, int64_t num_blocks) noexcept;
  void forget_end(TreeNode* node, int64_t num_blocks) noexcept;
  void prefetch_victims() const noexcept;
  void remove_leaf(TreeNode* node) noexcept;

  bool was_evicted(uint64_t point, const TokenView& tokens, int64_t start) const;
  void look_on(const Place& place, const TokenView& tokens, PathLook* look) const;
  std::vector<const TreeNode*> tops(std::optional<std::string_view> name) const;
  void add_entries(const TreeNode* root, int64_t limit, std::vector<TreeEntry>* found) const;

  TreeChanges everything() const;
  void log_inserted(const TreeNode* end, const TokenView& tokens, std::span<const int32_t> fresh) noexcept;
  void log_left(ChangeKind kind, const TreeNode* node, std::span<const int32_t> ids) noexcept;

  void check_nodes();
  void check_tiers();
  void check_companions();
  void check_siblings();
  void check_roots();
  void check_order();
  void check_ranks(const std::unordered_set<const TreeNode*>& listed);
  void check_blocks(const BlockPool& pool, bool is_host, int64_t num_cached,
                    std::optional<std::span<const int32_t>> owned_ids);

  const std::shared_ptr<BlockPool> pool_;
  const std::shared_ptr<BlockPool> host_pool_;
  const int64_t block_size_;
  const std::string eviction_;

  mutable std::mutex mutex_;
  NodeArena arena_;
  ChildTable children_;
  SiblingIndex siblings_;
  EvictionOrder order_;
  EvictedBlocks evicted_;
  uint64_t last_point_ = 0;
  std::map<std::string, TreeNode*, std::less<>> roots_;  // ordered: no names can be chosen that make it slow
  int64_t num_cached_ = 0;
  int64_t num_evictable_ = 0;
  int64_t num_host_cached_ = 0;
  int64_t num_host_evictable_ = 0;
  int64_t num_matches_ = 0;  // live ones
  TreeCounts counts_;        // but for num_host_evicted
  int32_t num_companions_ = 0;            // that there are, 0 and up; the free and the dead lists have room for all
  std::vector<int32_t> free_companions_;  // the next one to give stands last
  std::vector<int32_t> dead_companions_;
  std::vector<int32_t> pair_of_host_block_;  // [host blocks]: of Demotions; kNoBlock between calls
  std::unique_ptr<TreeLog> log_;  // null unless changes are logged
  uint64_t log_begin_ = 0;  // on the steady clock
};

inline int64_t Match::num_tokens() const { return num_blocks_ * tree_->block_size(); }

}  // namespace kvpage
