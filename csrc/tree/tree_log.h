// TreeLog: the blocks that a PrefixTree has cached and given up since the last answer, in order. A follower knows after
// every answer which blocks are cached.
//
//      changes      kInserted 7 < none | kInserted 9 < 7 | kWritten 3 from 9 | kLeftDevice 9 | kPromoted 2 from 3 | ...
//      tokens       block 7's          | block 9's       |
//      namespaces   of block 7         |
//
// Off by default, and bounded: a change that does not fit, or finds no memory, makes the whole log lost. A lost log
// records nothing; the next answer says so and is, instead of changes, the whole tree as if it were inserted now.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/token_view.h"

namespace kvpage {

enum class ChangeKind : int64_t {
  kInserted = 0,  // id: device block; value: the block before it. Its tokens, and its namespace if it is the first
  kInsertedHost = 1,  // the same of a host block; only where the whole tree is given
  kPromoted = 2,  // id: device block; value: the host block that it becomes a copy of
  kWritten = 3,  // id: host block; value: the device block that it becomes a copy of
  kLeftDevice = 4,  // id: device block; value: when it was last used, as TreeChanges::now; 0 if that is not known
  kLeftHost = 5,  // the same of a host block
};

struct TreeChange {
  ChangeKind kind;
  int64_t id;
  int64_t value;
};

// A block of either tier as the `value` of an insertion: its id, or for a host block, -2 - id.
constexpr int64_t kNothingBefore = -1;
constexpr int64_t host_reference(int64_t host_id) { return -2 - host_id; }

struct TreeChanges {
  bool is_restart = false;  // forget everything: what follows is all that is cached
  int64_t now = 0;  // nanoseconds of the steady clock
  std::vector<TreeChange> changes;
  std::vector<int32_t> tokens;  // [number of insertions, block_size]
  std::vector<std::string> namespaces;  // of the insertions with nothing before them
};

class TreeLog {
 public:
  // A log that holds at most so many bytes. It begins lost: a follower first needs all that is in the tree.
  explicit TreeLog(int64_t max_bytes) : max_bytes_(max_bytes) {}

  bool is_lost() const { return is_lost_; }
  void lose() noexcept;

  // Adds blocks in a row after `before`, with their tokens.
  void inserted(std::span<const int32_t> ids, int64_t before, const TokenView& tokens,
                const std::string* name) noexcept;
  void add(ChangeKind kind, int64_t id, int64_t value) noexcept;
  void left(ChangeKind kind, std::span<const int32_t> ids, uint64_t used_at) noexcept;

  // Everything so far; the log is empty, and not lost any more.
  TreeChanges take() noexcept;

 private:
  void lose_if_too_large() noexcept;

  int64_t max_bytes_;
  bool is_lost_ = true;
  TreeChanges changes_;
};

}  // namespace kvpage
