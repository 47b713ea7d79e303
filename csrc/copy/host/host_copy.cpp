#include "copy/host/host_copy.h"

#include <atomic>

#include "base/copy_bytes.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int kSharesPerThread = 8;
constexpr int64_t kBytesPerThread = int64_t{1} << 20;  // starting a thread costs as much as copying 0.2 MiB

// Returns the first byte of a share, a multiple of a cache line.
int64_t cut(int64_t num_bytes, int64_t share, int64_t num_shares) {
  return share == num_shares ? num_bytes : num_bytes / num_shares * share & ~int64_t{63};
}

std::byte* pointer(Address address) { return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)); }

void copy_share(const CopyPlan& plan, int64_t begin, int64_t end, bool streaming) {
  plan.for_each(begin, end, [streaming](Address src, Address dst, int64_t bytes) {
    copy_bytes(pointer(dst), pointer(src), bytes, streaming);
  });
  if (streaming) end_streaming();
}

}  // namespace

void copy_on_host(const CopyPlan& plan, int max_threads) {
  const int64_t num_bytes = plan.num_bytes();
  const bool streaming = num_bytes >= streaming_threshold();
  const int num_threads = useful_threads(num_bytes, kBytesPerThread, max_threads);
  if (num_threads == 1) return copy_share(plan, 0, num_bytes, streaming);
  // Threads take shares as they come: a thread that the system delays does not delay all of them.
  const int64_t num_shares = int64_t{num_threads} * kSharesPerThread;
  std::atomic<int64_t> next = 0;
  run_shares(num_threads, [&](int) {
    for (int64_t share = next++; share < num_shares; share = next++) {
      copy_share(plan, cut(num_bytes, share, num_shares), cut(num_bytes, share + 1, num_shares), streaming);
    }
  });
}

}  // namespace kvpage
