// SequenceLife: SequenceRows as a block manager uses it, beside sequences that know all their tokens. What each block
// holds is written down by slot, so a block that two would write, or a copy that was left out, is seen.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "sequences/sequence_rows.h"
#include "trial.h"

class SequenceLife : public Life {
 public:
  SequenceLife(int64_t num_blocks, bool is_caching, uint64_t seed, Figures* figures);

  void step() override;
  void compare() override;
  void end() override;
  void end_without_model() override;

 private:
  using Rows = std::vector<int64_t>;
  using Tokens = std::vector<int32_t>;
  using Memory = std::vector<uint64_t>;  // by slot
  struct Naive {
    Tokens tokens;           // written ones
    int64_t num_tokens = 0;  // that there is room for
    bool is_private = false;
    int64_t num_gone = 0;  // first positions that are given back
  };

  int64_t some_row();
  Rows some_rows();
  bool is_refused(const Rows& rows);
  int32_t some_token() { return static_cast<int32_t>(rng.chance(80) ? 0 : rng.below(3)); }
  Tokens some_tokens(int64_t count);
  std::vector<int32_t> ids(int64_t row) const;
  int64_t room(int64_t row) const;
  int64_t num_holders(int32_t id) const;
  bool is_shared(int64_t row, int64_t position) const;
  void write(int64_t row, const Tokens& tokens);
  static void copy(const Memory& source, int64_t from, int64_t to, Memory* destination);
  kvpage::HostUse host_use();
  void make(const kvpage::DueMoves& moves);
  int64_t num_room() const;
  int64_t some_spare();
  void expect_spare(Outcome found, int64_t num_taken, int64_t num_spare, int64_t num_room);
  template <typename Call>
  bool done(bool is_known, const Call& library);

  void begin();
  void append();
  void commit();
  void commit_each();
  void resume();
  void fork();
  void remove();
  void give_back();
  void look();
  void compare_one(int64_t row, const Naive& naive) const;

  std::shared_ptr<kvpage::BlockPool> pool_;
  std::shared_ptr<kvpage::BlockPool> host_pool_;  // null in half of the lives
  std::shared_ptr<kvpage::PrefixTree> tree_;
  bool is_caching_;
  std::unique_ptr<kvpage::SequenceRows> rows_;
  std::map<int64_t, Naive> naive_;
  Rows gone_;                      // numbers of sequences that have ended
  Memory memory_, host_memory_;
};
