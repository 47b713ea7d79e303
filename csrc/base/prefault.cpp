#include "base/prefault.h"

#include <unistd.h>

#ifdef __linux__
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // of Linux 5.14
#endif
#endif

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kPortionBytes = 32 << 20;  // whole huge pages; a call for it takes some milliseconds

void write_pages(std::byte* begin, const std::byte* end, int64_t page_bytes) {
  for (volatile std::byte* at = begin; at < end; at += page_bytes) *at = *at;
}

// Returns false where the system cannot do it.
bool populate_pages([[maybe_unused]] std::byte* begin, [[maybe_unused]] const std::byte* end) {
#ifdef __linux__
  while (madvise(begin, static_cast<size_t>(end - begin), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) return false;
    if (errno != EINTR && errno != EAGAIN) throw std::system_error(errno, std::generic_category());
  }
  return true;
#else
  return false;
#endif
}

}  // namespace

void prefault(std::byte* data, int64_t num_bytes, int max_threads) {
  if (num_bytes <= 0) return;
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  std::byte* const begin = data - reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(page_bytes);
  std::byte* const end = data + num_bytes;
  const int64_t num_portions = (end - begin - 1) / kPortionBytes + 1;
  parallel_for(num_portions, useful_threads(num_portions, 1, max_threads), [&](int64_t first, int64_t last) {
    std::byte* const from = begin + first * kPortionBytes;
    std::byte* const to = std::min(begin + last * kPortionBytes, end);
    if (populate_pages(from, to)) return;
    if (from < data) write_pages(data, data + 1, page_bytes);  // what is before it in the page is another's
    write_pages(from < data ? from + page_bytes : from, to, page_bytes);
  });
}

}  // namespace kvpage
