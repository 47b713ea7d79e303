// ByteRuns: runs of memory that count as one, in their order. Places count from the first run's first byte.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpage {

struct ByteRun {
  const std::byte* data;
  int64_t num_bytes;
};

class ByteRuns {
 public:
  explicit ByteRuns(int64_t num_runs) {
    runs_.reserve(static_cast<size_t>(num_runs));
    ends_.reserve(runs_.capacity());
  }

  void add(const ByteRun& run) {
    runs_.push_back(run);
    ends_.push_back(end() + run.num_bytes);
  }

  int64_t end() const { return ends_.empty() ? 0 : ends_.back(); }

  // Returns the beginning of the run that contains the place; null after the last one.
  const std::byte* run_at(int64_t place) const {
    const size_t i = index_of(place);
    return i < runs_.size() ? runs_[i].data : nullptr;
  }

  // Calls body(run, place) for the runs at [begin, end), cut to it; it returns whether to go on. A run at address null
  // stays at it.
  template <typename Body>
  void for_each(int64_t begin, int64_t end, const Body& body) const {
    for (size_t i = index_of(begin); begin < end; ++i) {
      const int64_t next = std::min(ends_[i], end), before = runs_[i].num_bytes - (ends_[i] - begin);
      if (next > begin && !body(ByteRun{runs_[i].data ? runs_[i].data + before : nullptr, next - begin}, begin)) return;
      begin = next;
    }
  }

 private:
  size_t index_of(int64_t place) const {
    return static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), place) - ends_.begin());
  }

  std::vector<ByteRun> runs_;
  std::vector<int64_t> ends_;  // place after each run
};

}  // namespace kvpage
