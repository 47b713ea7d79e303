// Executor 1: host memory to host memory, by a few threads.
#pragma once

#include "copy/plan/copy_plan.h"

namespace kvpage {

// Copies the plan's extents with at most `max_threads` threads and waits for them. A small plan stays on the calling
// thread. A plan larger than the last-level cache is written past it, so that memory is not read to be overwritten.
void copy_on_host(const CopyPlan& plan, int max_threads);

}  // namespace kvpage
