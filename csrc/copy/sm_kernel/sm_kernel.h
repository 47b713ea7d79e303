// Executor 3: the SM kernel. One launch copies all layers and pairs, within a device or from and to pinned host memory.
//
//   pieces x pairs, a tile a launch      what a launch needs to know travels as its parameters, so that nothing is
//   ┌────────────┬────────────┬────┐     allocated, uploaded or waited for:
//   │ all pieces │ all pieces │ .. │     [piece, piece, ... | pair, pair, pair, ...]   at most 32 KiB
//   │ 3760 pairs │ 3760 pairs │    │
//   └────────────┴────────────┴────┘     Llama-3-8B in separate layers (64 pieces): one launch up to 3,760 blocks
//
// What a launch is made of is plain arithmetic; a build without CUDA has it too, and runs the kernel's body on the host
// in tests.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "copy/plan/copy_plan.h"

namespace kvpage {

// The widest access, of 16, 8, 4, 2 or 1 bytes, that divides every address, step and length of the plan.
int64_t plan_vector_bytes(const CopyPlan& plan);

// The part of a plan that one launch copies: each of its pairs in each of its pieces.
struct CopyTile {
  int64_t first_piece, num_pieces, first_pair, num_pairs;

  int64_t metadata_bytes() const {
    return num_pieces * static_cast<int64_t>(sizeof(Piece)) + num_pairs * static_cast<int64_t>(sizeof(BlockPair));
  }
};

// As few tiles as keep each one's pieces and pairs within `capacity` bytes, which hold two of each at least. They cover
// the plan once.
std::vector<CopyTile> split_for_launches(int64_t num_pieces, int64_t num_pairs, int64_t capacity);

// What a launch copies, with the tile's pieces and pairs where the threads will find them.
CopyParams copy_params(const CopyPlan& plan, const CopyTile& tile, const Piece* pieces, const BlockPair* pairs,
                       int64_t vector_bytes);

constexpr int kThreadsPerGroup = 256;
constexpr int64_t kMostGroups = int64_t{1} << 20;

// Threads of the grid for so many units, a multiple of kThreadsPerGroup: at most `max_groups` groups, which then stride
// over the units.
int64_t launch_threads(int64_t num_units, int64_t max_groups);

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

// Launches the plan on `stream` (a cudaStream_t) of `device` and waits for nothing. Its addresses are device memory, or
// host memory that the device sees under the same addresses. Nothing of the plan is needed once this returns. Throws
// InvalidArgument for a stream that is being captured, CudaError when a launch fails, after which the destination
// blocks are undefined. Only in builds with CUDA.
void run_copy_kernel(const CopyPlan& plan, int device, uintptr_t stream, int64_t max_groups);

}  // namespace kvpage
