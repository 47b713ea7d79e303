#include "copy/sm_kernel/launch_plan.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace kvpage {

int64_t plan_vector_bytes(const CopyPlan& plan) {
  Address bits = 16;
  for (const Fragment& fragment : plan.geometry().fragments()) {
    bits |= fragment.src | fragment.dst | fragment.bytes;
    if (plan.geometry().num_src_blocks() > 1) bits |= fragment.src_step;
    if (plan.geometry().num_dst_blocks() > 1) bits |= fragment.dst_step;
  }
  return static_cast<int64_t>(bits & -bits);
}

std::vector<CopyTile> split_for_launches(int64_t num_fragments, int64_t num_pairs, int64_t capacity) {
  constexpr int64_t kFragment = sizeof(Fragment), kPair = sizeof(BlockPair);
  check(num_fragments >= 0 && num_pairs >= 0 && num_pairs <= std::numeric_limits<int32_t>::max(),
        "num_fragments and num_pairs must not be negative, nor 2**31 pairs or more, got ", num_fragments, " and ",
        num_pairs);
  check(capacity >= 2 * (kFragment + kPair), "capacity must be at least ", 2 * (kFragment + kPair), " bytes, got ",
        capacity);
  // The fragments may take half of the room, and the part of the other half that the pairs leave.
  const int64_t fragment_room = std::max(capacity / 2, capacity - num_pairs * kPair);
  const int64_t most_fragments = std::min(num_fragments, fragment_room / kFragment);
  const int64_t most_pairs = std::min(num_pairs, (capacity - most_fragments * kFragment) / kPair);
  std::vector<CopyTile> tiles;
  for (int64_t fragment = 0; fragment < num_fragments; fragment += most_fragments) {
    for (int64_t pair = 0; pair < num_pairs; pair += most_pairs) {
      tiles.push_back(
          {fragment, std::min(most_fragments, num_fragments - fragment), pair, std::min(most_pairs, num_pairs - pair)});
    }
  }
  return tiles;
}

CopyParams copy_params(const CopyPlan& plan, const CopyTile& tile, const Fragment* fragments, const BlockPair* pairs,
                       int64_t vector_bytes) {
  int64_t longest = 0;
  for (int64_t i = 0; i < tile.num_fragments; ++i) {
    longest = std::max(longest, plan.geometry().fragments()[tile.first_fragment + i].bytes);
  }
  const int64_t unit_bytes = vector_bytes * kLanes * kUnroll;
  CopyParams params{};
  params.fragments = fragments;
  params.pairs = pairs;
  params.num_fragments = tile.num_fragments;
  params.units_per_extent = std::max<int64_t>((longest + unit_bytes - 1) / unit_bytes, 1);
  params.num_units = params.units_per_extent * tile.num_fragments * tile.num_pairs;
  return params;
}

int64_t launch_threads(int64_t num_units, int64_t max_groups) {
  constexpr int64_t kUnitsPerGroup = kThreadsPerGroup / kLanes;
  return std::min((num_units + kUnitsPerGroup - 1) / kUnitsPerGroup, max_groups) * kThreadsPerGroup;
}

}  // namespace kvpage
