// SequenceRows: the sequences on the device of one BlockManager, by row.
//
//      row = version * 2^32 + index        rows_[index]: a sequence, or free
//
// A row keeps its number as long as the sequence is on the device. The index is given to others afterwards, with
// another version: an old number is refused, and never names somebody else's sequence.
//
// Every call holds a mutex, and is all or nothing. The mutexes of the tree and of the pool come after it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "base/token_view.h"
#include "sequences/sequence.h"
#include "tree/prefix_tree.h"

namespace kvpage {

// A number that names no sequence on the device. Reaches Python as KeyError.
struct UnknownRow : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Numbers of tokens, one for each row of a call, or one for all.
class Counts {
 public:
  explicit Counts(int64_t all) : all_(all) {}
  explicit Counts(std::span<const int64_t> each) : each_(each) {}
  bool fits(size_t num_rows) const { return !each_.data() || each_.size() == num_rows; }
  int64_t at(size_t i) const { return each_.data() ? each_[i] : all_; }

 private:
  int64_t all_ = 0;
  std::span<const int64_t> each_;
};

// A sequence that is to begin.
struct Prompt {
  TokenView tokens;
  std::string_view name;      // of its namespace
  int priority = 0;           // here and below: as of PrefixTree::match
  int64_t num_left_over = 1;
  bool shares_parts = false;  // whether it also gets the first tokens of a block that others have cached
  int64_t num_spare = 0;      // so many more blocks are to be left, free or evictable
  bool is_hit = true;         // once it has begun
};

// A sequence that is to begin at the end of a match, which takes all that others may find.
struct Resumption {
  int64_t num_tokens = 0;   // that there is to be room for
  int64_t num_written = 0;  // at least the match's
  std::span<const int32_t> pending;  // written tokens after the match, where others are to find them
  int64_t num_left = 0;     // first own blocks that stay given back
  int64_t num_spare = 0;    // as of Prompt
  std::span<const int32_t> host_ids;  // contents of the next own blocks
  std::string_view name;
  bool is_private = false;
  bool is_hit = false;
};

// When blocks are copied to the host and back.
struct HostUse {
  bool keeps_evicted = false;  // whether a block that leaves the device gets a host block
  int64_t fewest_loaded = 0;   // fewer host blocks of a prompt are left where they are: they are computed again
  int64_t min_hits = 0;        // blocks that as many matches have found get a host block early; 0: none do
};

// The copies that a call asks for: in this order, each list before the next.
struct DueMoves {
  std::vector<TierPair> demoted;   // (device, host): evicted
  std::vector<TierPair> promoted;  // (host, device)
  std::vector<TierPair> written;   // (device, host): early
  std::vector<TierPair> returned;  // (host, device): of a sequence that was swapped out
  std::vector<TierPair> copied;    // within the device
};

// The answer of `begin`.
struct BegunSequence {
  int64_t row = 0;
  int64_t num_cached = 0;   // tokens
  int64_t num_host = 0;     // blocks that come from the host
  int64_t num_refused = 0;  // blocks that were left on the host
  int32_t part_from = kNoBlock;  // the block whose first tokens are to be copied, after all moves
  int32_t part_to = kNoBlock;
  bool is_part_on_device = false;
};

class SequenceRows {
 public:
  // is_caching: whether sequences share blocks by their tokens.
  SequenceRows(std::shared_ptr<PrefixTree> tree, bool is_caching);
  ~SequenceRows();
  SequenceRows(const SequenceRows&) = delete;
  SequenceRows& operator=(const SequenceRows&) = delete;

  PrefixTree& tree() const { return *tree_; }
  int64_t num_rows() const;  // in use

  // --- one sequence ---

  // Begins a sequence with its longest cached prefix, a part of the next block, and free blocks, for which others are
  // evicted. OutOfBlocks without room, and nothing is changed. InvalidArgument as PrefixTree::match, without tokens,
  // and for a negative num_spare. Moves are due also where it throws.
  BegunSequence begin(const Prompt& prompt, const HostUse& host, DueMoves* moves);

  // Returns how many blocks the table of a resumed sequence has. Throws InvalidArgument for a wrong num_left.
  int64_t num_blocks_to_resume(const Match& match, const Resumption& resumption) const;

  // Begins a sequence with the blocks of a match, which it takes over, and free ones. If it throws, the match stays the
  // caller's. Throws as `begin` does, and InvalidArgument for wrong numbers. Returns the row.
  int64_t resume(Match& match, const Resumption& resumption, const HostUse& host, DueMoves* moves);

  // Returns the row of a new sequence with the first `num_tokens` tokens of another, all written, in the same blocks.
  // InvalidArgument for fewer than are in cached blocks and in those given back.
  int64_t fork(int64_t row, int64_t num_tokens);

  // Ends a sequence: releases its own blocks and its match.
  void remove(int64_t row);

  // Releases the blocks after the written tokens.
  void give_back_room(int64_t row);

  // Releases the own blocks whose tokens are all before the `num_tokens`th, of at most the written ones, where no other
  // sequence finds them; returns how many.
  int64_t release_before(int64_t row, int64_t num_tokens);

  // From here on no other sequence finds its blocks.
  void make_private(int64_t row);

  // Calls look(const Sequence&) and returns its result. It must not call back.
  template <typename Look>
  auto look_at(int64_t row, Look look) const {
    std::lock_guard lock(mutex_);
    return look(at(row));
  }

  // --- many sequences ---

  // Returns how many blocks `append` takes for them. InvalidArgument for a row that is named twice and for a negative
  // count.
  int64_t num_blocks_to_append(std::span<const int64_t> rows, const Counts& counts);

  // Makes room for more tokens as `append` does, where that copies nothing and enough blocks are free. Otherwise
  // returns false, and changes nothing.
  bool append_if_free(std::span<const int64_t> rows, const Counts& counts);

  // Makes room for more tokens, for which cached blocks are evicted. Where the last block is partly filled and shared,
  // all but its last holder get a copy. OutOfBlocks without room. Moves are due also where it throws.
  void append(std::span<const int64_t> rows, const Counts& counts, const HostUse& host, DueMoves* moves);

  // Records that K and V of `tokens` are written; returns how many blocks that has cached. InvalidArgument without
  // room.
  int64_t commit(int64_t row, const TokenView& tokens);

  // The same with one token of each row. A block that finds no memory in the tree is cached by the next commit.
  int64_t commit_each(std::span<const int64_t> rows, const TokenView& tokens);

  // Returns the longest table's number of blocks.
  int64_t most_blocks(std::span<const int64_t> rows) const;

  // Fills tables [num_rows, width], with 0 after a sequence's last block. `width` is at least most_blocks.
  void fill_tables(std::span<const int64_t> rows, int64_t width, int32_t* tables) const;

  // Fills the slot of each sequence's last token, and its number of tokens.
  void fill_last(std::span<const int64_t> rows, int64_t* slots, int64_t* num_tokens) const;

  // Fills the slots of the positions [starts[i], ends[i]), one sequence after the other, which check_positions has
  // taken and counted.
  int64_t check_positions(std::span<const int64_t> rows, std::span<const int64_t> starts,
                          std::span<const int64_t> ends) const;
  void fill_slots(std::span<const int64_t> rows, std::span<const int64_t> starts, std::span<const int64_t> ends,
                  int64_t* slots) const;

 private:
  struct Row {
    Sequence sequence;
    uint32_t version = 0;  // odd while it is in use, and grows with each change
  };
  struct Growth;

  Sequence& at(int64_t row);
  const Sequence& at(int64_t row) const;
  bool shares(const Sequence& sequence) const { return is_caching_ && !sequence.is_private; }
  static constexpr int64_t kMaxTokens = int64_t{1} << 61;  // of a sequence: no sum overflows

  int64_t blocks_for(int64_t num_tokens) const {
    return num_tokens / block_size_ + (num_tokens % block_size_ > 0 ? 1 : 0);
  }
  void name_all(std::span<const int64_t> rows);

  void reserve_row();
  int64_t take_row(Sequence&& sequence) noexcept;

  int64_t num_free() const;
  void check_free(int64_t num_blocks, int64_t num_spare = 0) const;
  void make_room(int64_t num_blocks, const HostUse& host, DueMoves* moves);
  void give(Sequence* fresh, const Match& match, int64_t num_on_device, bool is_hit, const HostUse& host,
            DueMoves* moves);
  Growth growth(std::span<const int64_t> rows, const Counts& counts);
  void grow(std::span<const int64_t> rows, const Counts& counts, const Growth& growth, DueMoves* moves);
  void reserve_ids(Sequence& sequence, int64_t count) const;
  int64_t commit_shared(Sequence& sequence, const TokenView& tokens);
  void cache_blocks(Sequence& sequence, const TokenView& tokens);
  int64_t cache_pending(Sequence& sequence);
  int64_t cache_full_blocks(Sequence& sequence);

  const std::shared_ptr<PrefixTree> tree_;
  const std::shared_ptr<BlockPool> pool_;
  const int64_t block_size_;
  const bool is_caching_;

  mutable std::mutex mutex_;
  std::vector<Row> rows_;
  std::vector<uint32_t> free_;  // indices; has room for all of them
  uint64_t num_calls_ = 0;  // that named rows
};

}  // namespace kvpage
