// BlockPool: the block ids of one tier, a count of references on each, and a stack of those that are free.
//
//      free stack        reference counts by block id
//      | 3 |  <- top     id      0   1   2   3   4   5   6   7
//      | 6 |             count   1   2   0*  0   1c  1c  0   1
//      | 2 |*            c: the one reference is the prefix tree's ("cached")
//      +---+
//
// A fresh pool hands out ascending ids. Blocks that are released together come back in the same order when they are
// allocated again, so that runs of neighbouring blocks, which copies merge, survive.
//
// A cached block has exactly one reference, its tree's. No caller can share or release it (pin a Match instead). So
// evicting it is certain to free it, and a caller who releases a block twice cannot take it from the tree.
//
// Every call holds the pool's mutex and is all or nothing: one that throws has changed nothing.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace kvpage {

class BlockPool {
 public:
  // Throws InvalidArgument unless 0 <= num_blocks < 2^31.
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(counts_.size()); }
  int64_t num_free() const;

  // Fills `ids` with blocks of one reference each, or throws OutOfBlocks.
  void allocate(std::span<int32_t> ids);

  // One more reference on each. InvalidArgument for an id that is out of range, free, or cached.
  void share(std::span<const int32_t> ids);

  // One reference less on each, once for every time that the id is named; a block without any becomes free.
  // InvalidArgument for an id that is out of range, cached, or has no reference left.
  void release(std::span<const int32_t> ids);

  // References on the block: 0 if it is free, 1 if it is cached. InvalidArgument if out of range.
  int64_t ref_count(int64_t block_id) const;

  // Throws std::runtime_error that names the broken invariant. O(num_blocks).
  void check_invariants() const;

  // --- for PrefixTree ---

  // The callers' only references on `fresh` become the tree's, and their references on `surplus` are released.
  // InvalidArgument if a fresh block is shared, free, cached or named twice, or a surplus one cannot be released.
  void adopt(std::span<const int32_t> fresh, std::span<const int32_t> surplus);

  // Throws as `adopt` would, and changes nothing.
  void check_adoptable(std::span<const int32_t> fresh, std::span<const int32_t> surplus);

  // Free blocks that are the tree's from now on, as many as there are and `ids` has room for; returns how many.
  int64_t adopt_free(std::span<int32_t> ids) noexcept;

  // The tree's references end; the last block ends up deepest in the stack. The ids are cached ones, unchecked.
  void drop(std::span<const int32_t> ids) noexcept;

  // Returns whether each block is cached. For the tree's own check.
  bool all_cached(std::span<const int32_t> ids) const;

 private:
  void check_id(int64_t block_id) const;
  void release_locked(std::span<const int32_t> ids);
  void adopt_locked(std::span<const int32_t> fresh, std::span<const int32_t> surplus);
  uint32_t count_or_zero(int32_t block_id) const;
  [[noreturn]] void refuse(int32_t block_id, uint32_t count, const char* verb) const;

  static constexpr uint32_t kCached = 1u << 31;  // beside the count, which is 1

  mutable std::mutex mutex_;
  std::vector<uint32_t> counts_;  // [num_blocks]
  std::vector<int32_t> free_;     // [num_blocks], of which the first num_free_ are the stack
  int64_t num_free_;
};

}  // namespace kvpage
