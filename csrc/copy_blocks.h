// Executor 3: device memory to device memory, all layers and pairs in one launch.
//
// copy_params, plan_vector_bytes and launch_threads are what the launch is made of; a build without CUDA has them too,
// and runs the kernel's body on the host in tests.
#pragma once

#include <cstdint>
#include <utility>

#include "copy_plan.h"

namespace kvpage {

// The widest access, of 16, 8, 4, 2 or 1 bytes, that divides every address, step and length of the plan.
int64_t plan_vector_bytes(const CopyPlan& plan);

// What a launch copies, with the plan's pieces and pairs where the threads will find them.
CopyParams copy_params(const CopyPlan& plan, const Piece* pieces, const BlockPair* pairs, int64_t vector_bytes);

constexpr int kThreadsPerGroup = 256;

// Threads of the grid for so many units, a multiple of kThreadsPerGroup. Beyond the cap, threads stride over the units.
int64_t launch_threads(int64_t num_units);

// Calls body(Vector{}) with the vector type of that many bytes.
template <typename Body>
void dispatch_vector(int64_t vector_bytes, Body&& body) {
  switch (vector_bytes) {
    case 16: return body(Vector16{});
    case 8: return body(uint64_t{});
    case 4: return body(uint32_t{});
    case 2: return body(uint16_t{});
    default: return body(uint8_t{});
  }
}

// Launches the plan on `stream` (a cudaStream_t) of `device`. Pieces and pairs travel as kernel parameters, up to some
// 4,000 pairs, and nothing is waited for; more go to memory allocated, filled and freed in the stream's order, and the
// stream is waited for before the launch. Nothing of the plan is needed once this returns. Throws CudaError; before the
// launch nothing has been written.
// Only in builds with CUDA.
void copy_on_device(const CopyPlan& plan, int device, uintptr_t stream);

}  // namespace kvpage
