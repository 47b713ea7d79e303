// PoolLife: BlockPool alone beside NaivePool, as a server without a prefix cache uses it, and as PrefixTree does.
#pragma once

#include "naive_pool.h"
#include "pool/block_pool.h"
#include "trial.h"

class PoolLife : public Life {
 public:
  PoolLife(int64_t num_blocks, uint64_t seed, Figures* figures);

  void step() override;
  void compare() override;
  void end() override;

 private:
  int64_t some_id();
  const Ids& some_ids(bool is_cached);

  void allocate();
  void share();
  void release();
  void adopt();
  void adopt_free();
  void drop();

  kvpage::BlockPool pool_;
  NaivePool naive_;
  Ids ids_, surplus_;  // of the step
};
