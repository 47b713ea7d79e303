#include <algorithm>
#include <limits>

#include "base/check.h"
#include "copy/sm_kernel/sm_kernel.h"

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

std::vector<CopyTile> split_for_launches(int64_t num_pieces, int64_t num_pairs, int64_t capacity) {
  constexpr int64_t kPiece = sizeof(Piece), kPair = sizeof(BlockPair);
  check(num_pieces >= 0 && num_pairs >= 0 && num_pairs <= std::numeric_limits<int32_t>::max(),
        "num_pieces and num_pairs must not be negative, nor 2**31 pairs or more, got ", num_pieces, " and ", num_pairs);
  check(capacity >= 2 * (kPiece + kPair), "capacity must be at least ", 2 * (kPiece + kPair), " bytes, got ", capacity);
  // The pieces may take half of the room, and what the pairs leave of the other half.
  const int64_t piece_room = std::max(capacity / 2, capacity - num_pairs * kPair);
  const int64_t most_pieces = std::min(num_pieces, piece_room / kPiece);
  const int64_t most_pairs = std::min(num_pairs, (capacity - most_pieces * kPiece) / kPair);
  std::vector<CopyTile> tiles;
  for (int64_t piece = 0; piece < num_pieces; piece += most_pieces) {
    for (int64_t pair = 0; pair < num_pairs; pair += most_pairs) {
      tiles.push_back({piece, std::min(most_pieces, num_pieces - piece), pair, std::min(most_pairs, num_pairs - pair)});
    }
  }
  return tiles;
}

CopyParams copy_params(const CopyPlan& plan, const CopyTile& tile, const Piece* pieces, const BlockPair* pairs,
                       int64_t vector_bytes) {
  int64_t longest = 0;
  for (int64_t i = 0; i < tile.num_pieces; ++i) {
    longest = std::max(longest, plan.geometry().pieces()[tile.first_piece + i].bytes);
  }
  const int64_t unit_bytes = vector_bytes * kLanes * kUnroll;
  CopyParams params{};
  params.pieces = pieces;
  params.pairs = pairs;
  params.num_pieces = tile.num_pieces;
  params.units_per_extent = std::max<int64_t>((longest + unit_bytes - 1) / unit_bytes, 1);
  params.num_units = params.units_per_extent * tile.num_pieces * tile.num_pairs;
  return params;
}

int64_t launch_threads(int64_t num_units, int64_t max_groups) {
  constexpr int64_t kUnitsPerGroup = kThreadsPerGroup / kLanes;
  return std::min((num_units + kUnitsPerGroup - 1) / kUnitsPerGroup, max_groups) * kThreadsPerGroup;
}

}  // namespace kvpage
