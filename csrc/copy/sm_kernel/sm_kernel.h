// Executor 3: the SM kernel. One launch copies all layers and pairs, within a device or from and to pinned host memory.
// Only in builds with CUDA. copy_thread.h has the work of a thread, launch_plan.h that of a launch.
#pragma once

#include <cstdint>

#include "copy/plan/copy_plan.h"

namespace kvpage {

// Launches the plan on `stream` (a cudaStream_t) of `device` and waits for nothing. Its addresses are device memory, or
// host memory that the device sees under the same addresses. Nothing of the plan is needed once this returns. Throws
// InvalidArgument for a stream that is being captured, CudaError when a launch fails, after which the destination
// blocks are undefined.
void run_copy_kernel(const CopyPlan& plan, int device, uintptr_t stream, int64_t max_groups);

}  // namespace kvpage
