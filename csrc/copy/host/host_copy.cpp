#include "copy/host/host_copy.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "copy/sm_kernel/sm_kernel.h"
#include "base/parallel.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvpage {
namespace {

constexpr int kSharesPerThread = 8;
constexpr int64_t kBytesPerThread = int64_t{1} << 20;  // starting a thread costs as much as copying 0.2 MiB

// Like memcpy, past the cache. 16-byte stores are part of every x86-64 and measured as fast as those of 32 and 64 bytes:
// a write-combining buffer is a cache line either way. The caller fences.
void stream_copy(std::byte* dst, const std::byte* src, int64_t bytes) {
#ifdef __SSE2__
  const int64_t head = std::min<int64_t>(-reinterpret_cast<intptr_t>(dst) & 63, bytes);
  std::memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 64; dst += 64, src += 64, bytes -= 64) {
    __m128i line[4];
    for (int i = 0; i < 4; ++i) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(dst) + i, line[i]);
  }
#endif
  std::memcpy(dst, src, bytes);
}

// The first byte of a share, a multiple of a cache line.
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

template <typename Vector>
void run_kernel(const CopyParams& params, int64_t max_threads) {
  const int64_t num_threads = std::min(launch_threads(params.num_units, kMostGroups), max_threads);
  for (int64_t thread = 0; thread < num_threads; ++thread) copy_thread<Vector>(params, thread, num_threads);
}

}  // namespace

// What the last-level cache holds, yet at most 32 MiB, because
// virtual machines report the cache of a whole socket. INT64_MAX where this build has no streaming stores.
int64_t streaming_threshold() {
#ifdef __SSE2__
  constexpr int64_t kMost = int64_t{32} << 20;
#ifdef _SC_LEVEL3_CACHE_SIZE
  const int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? std::min(cache, kMost) : kMost;
#else
  return kMost;
#endif
#else
  return INT64_MAX;
#endif
}

void copy_bytes(std::byte* dst, const std::byte* src, int64_t bytes, bool streaming) {
  if (streaming) {
    stream_copy(dst, src, bytes);
  } else {
    std::memcpy(dst, src, static_cast<size_t>(bytes));
  }
}

void end_streaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void copy_on_host(const CopyPlan& plan, int max_threads) {
  const int64_t num_bytes = plan.num_bytes();
  const bool streaming = num_bytes >= streaming_threshold();
  const int num_threads = useful_threads(num_bytes, kBytesPerThread, max_threads);
  if (num_threads == 1) return copy_share(plan, 0, num_bytes, streaming);
  // Threads take shares as they come, so that one which the system holds up does not hold up all.
  const int64_t num_shares = int64_t{num_threads} * kSharesPerThread;
  std::atomic<int64_t> next = 0;
  run_shares(num_threads, [&](int) {
    for (int64_t share = next++; share < num_shares; share = next++) {
      copy_share(plan, cut(num_bytes, share, num_shares), cut(num_bytes, share + 1, num_shares), streaming);
    }
  });
}

void run_copy_kernel_on_host(const CopyPlan& plan, int64_t vector_bytes, int64_t max_threads, int64_t capacity) {
  check(max_threads > 0 && max_threads % kLanes == 0, "max_threads must be a positive multiple of ", kLanes, ", got ",
        max_threads);
  check(vector_bytes > 0 && plan_vector_bytes(plan) % vector_bytes == 0, "vector_bytes must divide ",
        plan_vector_bytes(plan), ", got ", vector_bytes);
  constexpr int64_t kLeast = 2 * (sizeof(Piece) + sizeof(BlockPair));
  check(capacity >= kLeast, "capacity must be at least ", kLeast, " bytes, got ", capacity);
  const std::vector<Piece>& pieces = plan.geometry().pieces();
  for (const CopyTile& tile : split_for_launches(pieces.size(), plan.pairs().size(), capacity)) {
    const CopyParams params = copy_params(plan, tile, pieces.data() + tile.first_piece,
                                          plan.pairs().data() + tile.first_pair, vector_bytes);
    dispatch_vector(vector_bytes, [&](auto vector) { run_kernel<decltype(vector)>(params, max_threads); });
  }
}

}  // namespace kvpage
