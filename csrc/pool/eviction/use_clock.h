// UseClock: counts uses of entries, and tells the time. While it keeps time, a count is also the time, in nanoseconds,
// or a little later.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

namespace kvpage {

class UseClock {
 public:
  void keep_time(bool keeps_time) { keeps_time_ = keeps_time; }

  // For simulations: the time stands still there, until the next call.
  void set_time(int64_t nanoseconds) { set_time_ = nanoseconds; }

  int64_t now() const {
    if (set_time_) return *set_time_;
    const auto since_epoch = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count();
  }

  // Begins a use, after a gap.
  void begin_use() noexcept {
    ++count_;
    if (keeps_time_) count_ = std::max(count_, static_cast<uint64_t>(now()));
  }

  uint64_t tick() noexcept { return ++count_; }

 private:
  uint64_t count_ = 0;
  bool keeps_time_ = false;
  std::optional<int64_t> set_time_;
};

}  // namespace kvpage
