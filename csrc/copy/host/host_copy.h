// Executor 1: host memory to host memory, by a few threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy/plan/copy_plan.h"

namespace kvpage {

// Copies the plan's extents with at most `max_threads` threads and waits for them. Small plans stay on the calling
// thread; plans that exceed the last-level cache write past it (streaming stores), so that memory is not read in order
// to be overwritten.
void copy_on_host(const CopyPlan& plan, int max_threads);

// As memcpy; `streaming` past the cache, after which the thread has to call end_streaming() before others may read.
void copy_bytes(std::byte* dst, const std::byte* src, int64_t bytes, bool streaming);
void end_streaming();

// Bytes from which on a copy is better written past the cache; INT64_MAX where this build cannot.
int64_t streaming_threshold();

// The plan run through the body of the device kernel, on the calling thread, with vectors of `vector_bytes` (1, 2, 4, 8
// or 16) in a grid of at most `max_threads`, in launches of at most `capacity` bytes of pieces and pairs: what a GPU
// does, where there is none. Throws InvalidArgument if an address, a step or a length is no multiple of the vector.
void run_copy_kernel_on_host(const CopyPlan& plan, int64_t vector_bytes, int64_t max_threads, int64_t capacity);

}  // namespace kvpage
