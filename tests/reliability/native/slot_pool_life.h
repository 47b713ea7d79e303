// SlotPoolLife: SlotPool beside a list of slots and a search through all of them.
#pragma once

#include <optional>
#include <vector>

#include "states/slot_pool.h"
#include "trial.h"

class SlotPoolLife : public Life {
 public:
  SlotPoolLife(int64_t num_slots, uint64_t seed, Figures* figures);

  void step() override;
  void compare() override;
  void end() override;

 private:
  struct NaiveSlot {
    int64_t count = 0;
    std::optional<int64_t> rank;
  };

  void allocate();
  void occupy();
  void share();
  void release();
  void rank();
  void unrank();
  void victim();
  int64_t some_slot();
  int64_t num_references(int64_t slot) const;
  bool has_rank(int64_t slot) const { return num_references(slot) > 0 && naive_[slot].rank.has_value(); }

  kvpage::SlotPool pool_;
  std::vector<NaiveSlot> naive_;
  std::vector<int64_t> free_;  // the next one to hand out stands last
  std::vector<int64_t> kept_;
};
