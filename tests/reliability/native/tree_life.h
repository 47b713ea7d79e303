// TreeLife: BlockPool and PrefixTree with two tiers beside NaivePool and NaiveTree, and a memory that says of every
// block of both tiers whose K and V are in it. Every copy that the tree asks for is carried out at once.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "naive_tree.h"
#include "tree/prefix_tree.h"
#include "trial.h"

struct TreeWorld {
  int64_t num_blocks, num_host_blocks, block_size;
  int hash_bits;
  int64_t num_symbols;  // few: prefixes meet all the time; many: many siblings
  int64_t max_blocks;   // of what is inserted or looked up at once
};

class TreeLife : public Life {
 public:
  TreeLife(const TreeWorld& world, uint64_t seed, Figures* figures);

  void step() override;
  void compare() override;
  void end() override;
  void end_without_model() override;

 private:
  struct Held {
    kvpage::Match real;
    NaiveMatch naive;
  };

  Tokens tokens(int64_t count);
  Ids some_ids(int64_t count);
  int64_t some_priority();
  Held* some_match();
  void keep(kvpage::Match real, NaiveMatch naive);
  void own(const Ids& ids);
  void disown(const Ids& ids);

  void allocate();
  void allocate(int64_t count);
  void share();
  void release_ids();
  void match();
  void match_part();
  void pin();
  void release();
  void release_at(size_t at);
  void trim();
  void companions();
  void promote();
  void write_out();
  void insert();
  void evict();
  void demote();
  void evict_host();
  void drop();
  void clear();

  void to_host(const std::vector<kvpage::TierPair>& real, const std::vector<NaivePair>& naive);
  void to_device(const std::vector<kvpage::TierPair>& real, const std::vector<NaivePair>& naive);
  void compare_path(const Held& held);
  void compare_memory();
  void check();
  void check_findable(const NaiveBlock& last);

  TreeWorld world_;
  std::shared_ptr<kvpage::BlockPool> pool_, host_pool_;
  std::shared_ptr<kvpage::PrefixTree> tree_;
  NaivePool naive_pool_;
  NaiveTree naive_;
  Ids owned_;  // an id for each reference
  std::vector<Held> matches_;
  std::vector<uint64_t> device_memory_, host_memory_;  // contents
  std::vector<int64_t> host_number_;                   // by host id: which time of giving it was
};
