// CopyLife: CopyGeometry and CopyPlan run by every executor of the host, beside one loop over all elements. The bytes
// around and between the blocks count as well.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "copy/plan/copy_plan.h"
#include "trial.h"

class CopyLife : public Life {
 public:
  CopyLife(uint64_t seed, Figures* figures);

  void step() override;
  void compare() override;
  void end() override {}

 private:
  using Bytes = std::vector<std::byte>;
  using Pairs = std::vector<int64_t>;

  std::vector<int64_t> strides(bool block_first, int64_t* num_bytes);
  kvpage::CacheView view(Bytes* memory, int64_t num_blocks);
  Pairs some_pairs();
  bool can_copy(const Pairs& pairs) const;
  void copy_naively(const Pairs& pairs);
  void copy_block(int64_t src_id, int64_t dst_id, const Bytes& before);
  void run(const kvpage::CopyPlan& plan, const Pairs& pairs);

  bool is_same_;
  kvpage::BlockShape shape_;
  Bytes src_memory_, dst_memory_, naive_;
  kvpage::CacheView src_, dst_;
  std::unique_ptr<kvpage::CopyGeometry> geometry_;
};
