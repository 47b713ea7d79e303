// SequenceRows: the arguments of a step.
#include <algorithm>

#include "base/check.h"
#include "sequences/sequence_rows.h"

namespace kvpage {

int64_t SequenceRows::most_blocks(std::span<const int64_t> rows) const {
  std::lock_guard lock(mutex_);
  size_t most = 0;
  for (const int64_t row : rows) most = std::max(most, at(row).ids.size());
  return static_cast<int64_t>(most);
}

void SequenceRows::fill_tables(std::span<const int64_t> rows, int64_t width, int32_t* tables) const {
  std::lock_guard lock(mutex_);
  for (const int64_t row : rows) {
    const auto& ids = at(row).ids;
    check(static_cast<int64_t>(ids.size()) <= width, "width must be at least ", ids.size(), ", got ", width);
    std::fill(std::copy(ids.begin(), ids.end(), tables), tables + width, 0);
    tables += width;
  }
}

void SequenceRows::fill_last(std::span<const int64_t> rows, int64_t* slots, int64_t* num_tokens) const {
  std::lock_guard lock(mutex_);
  for (const int64_t row : rows) {
    const Sequence& sequence = at(row);
    check(sequence.num_tokens > 0, "rows must have a token, row ", row, " has none");
    check(sequence.num_given() < sequence.ids.size() || sequence.num_left == 0,
          "rows must have the blocks of their last tokens, row ", row, " has given its own back");
    const int64_t in_block = sequence.num_tokens - 1 - (static_cast<int64_t>(sequence.ids.size()) - 1) * block_size_;
    *slots++ = sequence.ids.back() * block_size_ + in_block;
    *num_tokens++ = sequence.num_tokens;
  }
}

int64_t SequenceRows::check_positions(std::span<const int64_t> rows, std::span<const int64_t> starts,
                                      std::span<const int64_t> ends) const {
  std::lock_guard lock(mutex_);
  check(starts.size() == rows.size() && ends.size() == rows.size(), "starts and ends must be one for each of ",
        rows.size(), " rows, got ", starts.size(), " and ", ends.size());
  int64_t count = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t most = at(rows[i]).num_tokens;
    check(0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= most, "positions of row ", rows[i], " must be in [0, ",
          most, "], got [", starts[i], ", ", ends[i], "]");
    count += ends[i] - starts[i];
  }
  return count;
}

void SequenceRows::fill_slots(std::span<const int64_t> rows, std::span<const int64_t> starts,
                              std::span<const int64_t> ends, int64_t* slots) const {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& ids = at(rows[i]).ids;
    for (int64_t position = starts[i]; position < ends[i];) {
      const int64_t block = position / block_size_, end = std::min(ends[i], (block + 1) * block_size_);
      int64_t slot = ids[static_cast<size_t>(block)] * block_size_ + position % block_size_;
      for (; position < end; ++position) *slots++ = slot++;
    }
  }
}

}  // namespace kvpage
