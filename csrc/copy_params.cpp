#include <algorithm>

#include "copy_blocks.h"

namespace kvpage {

int64_t plan_vector_bytes(const CopyPlan& plan) {
  Address bits = 16;
  for (const Piece& piece : plan.geometry().pieces()) {
    bits |= piece.src | piece.dst | piece.bytes;
    if (plan.geometry().num_src_blocks() > 1) bits |= piece.src_step;
    if (plan.geometry().num_dst_blocks() > 1) bits |= piece.dst_step;
  }
  return static_cast<int64_t>(bits & -bits);
}

CopyParams copy_params(const CopyPlan& plan, const Piece* pieces, const BlockPair* pairs, int64_t vector_bytes) {
  int64_t longest = 0;
  for (const Piece& piece : plan.geometry().pieces()) longest = std::max(longest, piece.bytes);
  const int64_t unit_bytes = vector_bytes * kLanes * kUnroll;
  CopyParams params{};
  params.pieces = pieces;
  params.pairs = pairs;
  params.num_pieces = static_cast<int64_t>(plan.geometry().pieces().size());
  params.units_per_extent = std::max<int64_t>((longest + unit_bytes - 1) / unit_bytes, 1);
  params.num_units = params.units_per_extent * params.num_pieces * static_cast<int64_t>(plan.pairs().size());
  return params;
}

int64_t launch_threads(int64_t num_units) {
  constexpr int64_t kMostGroups = int64_t{1} << 20;
  constexpr int64_t kUnitsPerGroup = kThreadsPerGroup / kLanes;
  return std::min((num_units + kUnitsPerGroup - 1) / kUnitsPerGroup, kMostGroups) * kThreadsPerGroup;
}

}  // namespace kvpage
