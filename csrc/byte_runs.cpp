#include "byte_runs.h"

#include <algorithm>
#include <limits>

#include "check.h"

namespace kvpage {

ByteRuns::ByteRuns(std::vector<ByteRun> runs, int64_t stretch_bytes)
    : runs_(std::move(runs)), stretch_bytes_(stretch_bytes) {
  check(stretch_bytes > 0, "stretch_bytes must be positive, got ", stretch_bytes);
  for (const ByteRun& run : runs_) {
    check(run.num_bytes > 0 && run.num_bytes <= std::numeric_limits<int64_t>::max() - num_bytes_,
          "a run must have a positive number of bytes, got ", run.num_bytes);
    num_bytes_ += run.num_bytes;
  }
}

std::vector<ByteRun> ByteRuns::peek(int64_t num_bytes, int64_t max_runs) const {
  std::vector<ByteRun> next;
  int64_t offset = offset_;
  for (size_t at = run_; at < runs_.size() && num_bytes > 0 && static_cast<int64_t>(next.size()) < max_runs; ++at) {
    const int64_t count = std::min(runs_[at].num_bytes - offset, num_bytes);
    next.push_back({runs_[at].data + offset, count});
    num_bytes -= count, offset = 0;
  }
  return next;
}

// body(data, bytes, hash): neighbours of one run and one stretch.
template <typename Body>
void ByteRuns::for_each_piece(int64_t num_bytes, const Body& body) {
  check(num_bytes >= 0 && num_bytes <= num_bytes_ - position_, "num_bytes must be in [0, ", num_bytes_ - position_,
        "], got ", num_bytes);
  while (num_bytes > 0) {
    const ByteRun& run = runs_[run_];
    const int64_t count = std::min({num_bytes, run.num_bytes - offset_, stretch_bytes_ - position_ % stretch_bytes_});
    body(run.data + offset_, count);
    num_bytes -= count, position_ += count, offset_ += count;
    if (offset_ == run.num_bytes) ++run_, offset_ = 0;
    if (position_ % stretch_bytes_ == 0 || position_ == num_bytes_) {
      digests_.push_back(hash_.digest());
      hash_.restart();
    }
  }
}

void ByteRuns::advance(int64_t num_bytes) {
  for_each_piece(num_bytes, [&](const std::byte* data, int64_t count) { hash_.update(data, count); });
}

void ByteRuns::copy(std::byte* to, int64_t num_bytes) {
  for_each_piece(num_bytes, [&](const std::byte* data, int64_t count) {
    hash_.update_and_copy(data, count, to, false);
    to += count;
  });
}

}  // namespace kvpage
