// prefetch: memory that is read soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

// Fetches memory into the second-level cache. Any address will do, mapped or not. Static, so that each file for an
// instruction set has its own copy.
static inline void prefetch(const std::byte* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

}  // namespace kvpage
