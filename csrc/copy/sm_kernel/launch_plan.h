// CopyTile and launches: how the SM kernel's launches divide a plan among them.
//
//   fragments x pairs, a tile a launch              A launch carries its fragments and pairs as parameters: nothing is
//   ┌───────────────┬───────────────┬────┐          allocated, uploaded or waited for.
//   │ all fragments │ all fragments │ .. │
//   │ 3760 pairs    │ 3760 pairs    │    │          [fragment, fragment, ... | pair, pair, pair, ...]   at most 32 KiB
//   └───────────────┴───────────────┴────┘
//
// Llama-3-8B in separate layers (64 fragments): one launch up to 3,760 blocks. All of this is plain arithmetic, which a
// build without CUDA has as well.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/plan/copy_plan.h"
#include "copy/sm_kernel/copy_thread.h"

namespace kvpage {

// Returns the widest access, of 16, 8, 4, 2 or 1 bytes, that divides every address, step and length of the plan.
int64_t plan_vector_bytes(const CopyPlan& plan);

// The part of a plan that one launch copies: each of its pairs in each of its fragments.
struct CopyTile {
  int64_t first_fragment, num_fragments, first_pair, num_pairs;

  int64_t metadata_bytes() const {
    return num_fragments * static_cast<int64_t>(sizeof(Fragment)) + num_pairs * static_cast<int64_t>(sizeof(BlockPair));
  }
};

// Returns the tiles of a plan, which cover it once: as few as keep each one's fragments and pairs within `capacity`
// bytes. The capacity must hold two of each at least.
std::vector<CopyTile> split_for_launches(int64_t num_fragments, int64_t num_pairs, int64_t capacity);

// Returns the parameters of a launch; `fragments` and `pairs` are the tile's, where the threads will find them.
CopyParams copy_params(const CopyPlan& plan, const CopyTile& tile, const Fragment* fragments, const BlockPair* pairs,
                       int64_t vector_bytes);

constexpr int kThreadsPerGroup = 256;
constexpr int64_t kMostGroups = int64_t{1} << 20;

// Returns the number of threads for so many units, a multiple of kThreadsPerGroup. At most `max_groups` groups stride
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

}  // namespace kvpage
