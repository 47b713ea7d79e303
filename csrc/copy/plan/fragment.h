// Fragment and BlockPair: the plain data of a copy, which the host compiler and nvcc both read.
#pragma once

#include <cstdint>

#include "copy/plan/cache_view.h"

namespace kvpage {

// Bytes of a block that are contiguous in source and destination. Those of block b: src + b * src_step, dst + b *
// dst_step.
struct Fragment {
  Address src, dst;
  int64_t bytes, src_step, dst_step;
};

// Block src_id becomes block dst_id.
struct BlockPair {
  int32_t src_id, dst_id;
};

}  // namespace kvpage
