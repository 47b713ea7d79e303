// Memory that is soon read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

// Asks for it, into the second-level cache. It may be anybody's, or nobody's. Static: files for one instruction set have
// their own.
static inline void prefetch(const std::byte* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

}  // namespace kvpage
