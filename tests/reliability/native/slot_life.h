// SlotLife: SlotAllocator and SlotTree beside a list of bits and NaiveSlots. A slot that the tree names for a prefix
// must hold it, in the version that it says.
#pragma once

#include <vector>

#include "naive_slots.h"
#include "slots/slot_allocator.h"
#include "slots/slot_tree.h"
#include "trial.h"

struct SlotWorld {
  int64_t max_capacity, max_slots, num_symbols, max_tokens;
};

class SlotLife : public Life {
 public:
  SlotLife(const SlotWorld& world, uint64_t seed, Figures* figures);

  void step() override;
  void compare() override;
  void end() override;

 private:
  using Tokens = NaiveSlots::Tokens;

  Tokens tokens();
  void insert();
  void find();
  void pin();
  void release();
  void withdraw();
  void alloc();
  void free();
  void occupy();
  void withdraw_stale();
  void compare_match(const kvpage::SlotMatch& match, const Tokens& tokens, int64_t num_expected);

  SlotWorld world_;
  kvpage::SlotAllocator allocator_;
  kvpage::SlotTree tree_;
  NaiveSlots naive_;
  std::vector<bool> is_free_;
  std::vector<int64_t> versions_;
  std::vector<Tokens> pins_;
};
