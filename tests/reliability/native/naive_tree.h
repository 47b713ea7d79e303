// NaiveTree: what PrefixTree with two tiers means: a record for every block, and every question a search of all
// records. Here are no edges, no hashes, no lists. Device ids are a NaivePool's, exactly. Which free host block is
// taken is not promised: each time that a host block is given to a record it gets a number here.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "naive_pool.h"

using Tokens = std::vector<int64_t>;

constexpr int32_t kNone = -1;
constexpr int root_of(int name) { return -2 - name; }

struct NaiveBlock {
  bool is_live = false;
  int parent = 0;  // the record of the block before; root_of(namespace) for a first block
  int depth = 0;   // blocks before it
  Tokens tokens;
  uint64_t content = 0;  // says whose K and V: of the namespace and all tokens up to its end
  int32_t device = kNone;
  int64_t host = 0;  // a number; 0: it has no host block
  int64_t pins = 0;
  int64_t used = 0;
  int priority = 0;
  int32_t companion = kNone;
};

struct NaiveMatch {
  int name = 0;
  std::vector<int> path;  // records
  int priority = 0;
  bool is_live = true;
};

// From a device id to a number, or the other way.
using NaivePair = std::pair<int64_t, int64_t>;

class NaiveTree {
 public:
  NaiveTree(NaivePool* pool, int64_t block_size, int64_t num_host_blocks)
      : num_free_host(num_host_blocks), pool_(pool), block_size_(block_size) {}

  std::vector<int> path_of(int name, const Tokens& tokens, int64_t most_blocks) const;
  std::vector<int> below(const NaiveMatch& match, const Tokens& tokens) const;
  int64_t on_device(const std::vector<int>& path) const;
  Tokens tokens_of(const NaiveMatch& match) const;

  NaiveMatch match(int name, const Tokens& tokens, int priority);
  bool can_match(int name, const Tokens& tokens, int priority) const;
  int64_t longest_part(const NaiveMatch& match, const Tokens& tokens) const;
  void touch(const NaiveMatch& match, int first, int64_t num_blocks);
  NaiveMatch pinned(int name, const std::vector<int>& path, int priority);
  void release(NaiveMatch& match);
  void trim(NaiveMatch& match);

  bool can_promote(const NaiveMatch& match, const Ids& ids) const;
  std::vector<NaivePair> promote(const NaiveMatch& match, const Ids& ids);
  std::vector<NaivePair> write_out(const NaiveMatch& match);

  bool can_insert(int name, const Tokens& tokens, const Ids& ids, const NaiveMatch* after, int priority) const;
  NaiveMatch insert(int name, const Tokens& tokens, const Ids& ids, NaiveMatch* after, int priority);

  int64_t leave(int64_t num_blocks, bool may_copy, std::vector<NaivePair>* pairs);
  int64_t evict_host(int64_t num_blocks);
  int64_t drop(int name, const Tokens& tokens);
  int64_t clear();

  int64_t count(int32_t NaiveBlock::* tier, bool only_unpinned) const;
  int64_t count_host(bool only_unpinned) const;

  std::vector<NaiveBlock> blocks;  // some not live
  int64_t num_free_host;

 private:
  struct Given;

  int child(int parent, const Tokens& tokens, int64_t start) const;
  int add(int parent, const Tokens& tokens, int64_t start, int32_t device);
  void unpin(const std::vector<int>& path, size_t begin);
  Given given(int name, const Tokens& tokens, const Ids& ids, const NaiveMatch* after) const;
  template <typename Has>
  int oldest(const Has& has) const;
  // The unpinned block of the lowest priority whose host block was used last, where that is a copy; kNone if none is.
  int newest_copy() const;
  void free_device(NaiveBlock& block);
  void forget(int record);
  bool evict_host_one();
  bool find_host();

  NaivePool* pool_;
  int64_t block_size_;
  int64_t clock_ = 0;
  int64_t num_given_ = 0;
};
