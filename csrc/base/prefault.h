// prefault: has the operating system give memory its pages now, by several threads, and not when it is first written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

// Leaves the bytes as they are; meanwhile no thread may write them. Throws std::system_error where the system has no
// more memory to give.
void prefault(std::byte* data, int64_t num_bytes, int max_threads);

}  // namespace kvpage
