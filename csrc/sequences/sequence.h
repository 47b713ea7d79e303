// Sequence: the blocks of one sequence on the device, and how many of its tokens are written.
//
//      ids      [ 17   4   9 |  .  30  12 ]     17, 4, 9: the match's, which the tree owns
//                  cached    |  own             .: given back (num_left of them), the entry means nothing
//      tokens   [ ccc  ccc ccc | ppp  p    |     ]
//                 in the match   pending     room
//               |<---- num_written ---->|
//               |<-------- num_tokens ---------->|
//
// The first cache line has all that a decode step reads besides the ids.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tree/prefix_tree.h"

namespace kvpage {

struct alignas(64) Sequence {
  std::vector<int32_t> ids;
  int64_t num_tokens = 0;   // that there is room for
  int64_t num_written = 0;  // cached or committed
  uint64_t named_by = 0;    // the last call that named it
  bool is_forked = false;   // its last own block may be shared
  bool is_private = false;  // no other sequence finds the blocks that it commits

  alignas(64) std::vector<int32_t> pending;  // written tokens after the match; none where nothing is shared
  Match match;                               // pins the cached part
  std::string name;                          // of its namespace
  int64_t num_left = 0;                      // first own blocks that are given back, before a sliding window

  // The blocks to which the sequence itself holds a reference.
  std::span<const int32_t> own_ids() const { return std::span(ids).subspan(num_given()); }
  size_t num_given() const { return static_cast<size_t>(match.num_blocks() + num_left); }
};

}  // namespace kvpage
