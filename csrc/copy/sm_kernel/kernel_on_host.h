// The SM kernel without a GPU: the same index arithmetic, run thread by thread on the host. Tests compare what it
// copies.
#pragma once

#include <cstdint>

#include "copy/plan/copy_plan.h"

namespace kvpage {

// Runs the plan through the body of the device kernel, on the calling thread, with vectors of `vector_bytes` (1, 2, 4,
// 8 or 16) in a grid of at most `max_threads`, in launches of at most `capacity` bytes of fragments and pairs. Throws
// InvalidArgument if an address, a step or a length is no multiple of the vector.
void run_copy_kernel_on_host(const CopyPlan& plan, int64_t vector_bytes, int64_t max_threads, int64_t capacity);

}  // namespace kvpage
