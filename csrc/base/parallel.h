// A few threads for one call, of those that wait for calls (base/workers.h). Waking them costs some microseconds: small
// work stays on the caller's thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include "base/workers.h"

namespace kvpage {

// Returns how many threads are worth waking: at most `max_threads`, and each with at least `grain` of the work.
inline int useful_threads(int64_t work, int64_t grain, int max_threads) {
  return static_cast<int>(std::clamp<int64_t>(work / grain, 1, std::max(max_threads, 1)));
}

// Runs body(share) for each share in [0, num_shares), and waits for all: on the caller's own thread and on workers.
// Where there are fewer of those, some run several shares. So no share may wait for another. The first exception is
// thrown at the end.
template <typename Body>
void run_shares(int num_shares, const Body& body) {
  if (num_shares == 1) return body(0);
  struct Call {
    const Body& body;
    std::exception_ptr error;
    std::mutex mutex;
  } call{body, {}, {}};
  const auto run = [](void* context, int share) {
    Call& mine = *static_cast<Call*>(context);
    try {
      mine.body(share);
    } catch (...) {
      std::lock_guard lock(mine.mutex);
      if (!mine.error) mine.error = std::current_exception();
    }
  };
  if (num_shares > 0) run_on_workers(num_shares, run, &call);
  if (call.error) std::rethrow_exception(call.error);
}

// Runs body(begin, end) on equal parts of [0, num_items), several for each of `num_threads`. Threads take them as they
// come: a thread that the system delays does not delay all of them.
template <typename Body>
void parallel_for(int64_t num_items, int num_threads, const Body& body) {
  constexpr int64_t kPartsPerThread = 8;
  const int64_t num_parts = num_threads == 1 ? 1 : std::clamp<int64_t>(num_items, 1, kPartsPerThread * num_threads);
  std::atomic<int64_t> next = 0;
  run_shares(num_threads, [&](int) {
    for (int64_t part = next++; part < num_parts; part = next++) {
      const int64_t begin = num_items * part / num_parts, end = num_items * (part + 1) / num_parts;
      if (begin < end) body(begin, end);
    }
  });
}

}  // namespace kvpage
