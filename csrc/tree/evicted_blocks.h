// EvictedBlocks: the last blocks that were evicted, so that a look can tell them from those that were never computed.
//
//      node          ... [ . . . . | x x x ]        three blocks leave the end of an edge, and the tree
//      its new end               point              keys: hash(point, first x)
//
// A key is the hash by which ChildTable would find the block below the point that is before it. So an edge that is
// evicted as a whole costs one store: its node has the key. A key is found as long as the point stays: until what is
// before it is evicted too, or grows in another way. It serves for no more than a word on what happened.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpage {

class EvictedBlocks {
 public:
  static constexpr size_t kMost = 4096;

  EvictedBlocks() : keys_(kMost) {}

  // Remembers a run of blocks by the key of its first one; the oldest of kMost is forgotten.
  void add(uint64_t key) noexcept { keys_[num_added_++ % kMost] = key; }

  bool has(uint64_t key) const {
    const auto end = keys_.begin() + static_cast<ptrdiff_t>(std::min(num_added_, kMost));
    return std::find(keys_.begin(), end, key) != end;
  }

  void clear() noexcept { num_added_ = 0; }

 private:
  std::vector<uint64_t> keys_;
  size_t num_added_ = 0;
};

}  // namespace kvpage
