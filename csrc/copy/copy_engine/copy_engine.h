// Executor 2: host memory to device memory or back, by the copy engines. Only in builds with CUDA.
//
//   stream      ──work──┐                                       ┌──later work──►
//                       └─ batch: extent, extent, extent, ... ──┘
//   null stream ──work──●event                        event●────later work──►     cuMemcpyBatchAsync refuses it, so the
//   side stream          └─────────── batch ───────────┘                          batch runs between two events
#pragma once

#include <cstdint>
#include <memory>

#include "copy/plan/copy_plan.h"

namespace kvpage {

class CopyEngine {
 public:
  // `pinned`: whether all host memory of the plans to come is page-locked. Pageable memory is copied extent by extent,
  // which the runtime does through buffers of its own and which may block the caller.
  CopyEngine(int device, bool pinned);
  ~CopyEngine();

  // Enqueues the plan on `stream` (a cudaStream_t) and, where the memory is pinned, does not wait: host memory must
  // stay until the stream has passed. One thread at a time. Throws InvalidArgument for a stream that is being captured;
  // CudaError when a call fails, after which the destination blocks are undefined.
  void run(const CopyPlan& plan, uintptr_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Returns whether this driver has cuMemcpyBatchAsync.
bool has_batched_copy();

}  // namespace kvpage
