// Region: the bytes of one fragment in all blocks of one side; and whether regions share memory.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/plan/fragment.h"

namespace kvpage {

// A fragment of every block on one side: bytes at begin, begin + step, ..., `count` times.
struct Region {
  Address begin;
  int64_t bytes, step, count;

  Address end() const { return begin + (count - 1) * step + bytes; }
};

std::vector<Region> source_regions(const std::vector<Fragment>& fragments, int64_t num_blocks);
std::vector<Region> target_regions(const std::vector<Fragment>& fragments, int64_t num_blocks);

// Returns whether no byte belongs to two regions, or twice to one. May answer "no" wrongly, never "yes": for steps that
// differ, and for regions that begin more than a step apart.
bool are_disjoint(std::vector<Region> regions);

// Returns whether the range of memory from the first to the last byte of `a` meets that of `b`.
bool ranges_meet(const std::vector<Region>& a, const std::vector<Region>& b);

}  // namespace kvpage
