// copy_bytes: memcpy, or the same past the processor's cache (streaming stores).
//
// Streaming pays where the target is larger than the cache: memory is then not read in order to be overwritten.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

// Copies as memcpy does. With `streaming` it writes past the cache: the thread then calls end_streaming() before other
// threads may read.
void copy_bytes(std::byte* dst, const std::byte* src, int64_t bytes, bool streaming);
void end_streaming();

// Returns the number of bytes from which on a copy is better written past the cache: the size of the last-level cache,
// at most 32 MiB, because virtual machines report the cache of a whole socket. INT64_MAX in a build that cannot stream.
int64_t streaming_threshold();

}  // namespace kvpage
