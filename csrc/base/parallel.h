// A few threads for one call. They are started for the call and joined before it returns. So a caller that forks, or
// unloads the library, meets no other thread. Starting one costs 10 to 30 us: small work stays on the caller's thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace kvpage {

// Returns how many threads are worth starting: at most `max_threads`, and each with at least `grain` of the work.
inline int useful_threads(int64_t work, int64_t grain, int max_threads) {
  return static_cast<int>(std::clamp<int64_t>(work / grain, 1, std::max(max_threads, 1)));
}

// Runs body(share) for each share in [0, num_shares), one thread a share, the caller's own thread among them, and waits
// for all. Where the system gives fewer threads, the caller does the rest. The first exception is thrown at the
// end.
template <typename Body>
void run_shares(int num_shares, const Body& body) {
  std::exception_ptr error;
  std::mutex mutex;
  auto run = [&](int share) {
    try {
      body(share);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  int started = 1;
  try {
    threads.reserve(static_cast<size_t>(std::max(num_shares - 1, 0)));
    for (; started < num_shares; ++started) threads.emplace_back(run, started);
  } catch (const std::exception&) {  // no thread, or no memory for one
  }
  for (int share = started; share < num_shares; ++share) run(share);
  if (num_shares > 0) run(0);
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
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
