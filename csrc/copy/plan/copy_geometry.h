// CopyGeometry: which bytes of a block are copied, for all blocks alike; every swap and every copy of blocks has one.
//
//   one block of all layers, as the source and the destination hold it
//
//   fragment 0   src ────────┐  dst ────────┐   layer 0, K
//   fragment 1   src ────────┤  dst ────────┤   layer 0, V
//   fragment 2   src ────────┘  dst ────────┘   layer 1, K
//
// A fragment is a run of bytes that is contiguous on both sides. Dimensions that are dense in source and destination
// alike are collapsed. Neighbours are merged across dimensions and layers, so a packed slab gives one fragment.
//
// A geometry is made once for a pair of caches and checked then. It neither owns nor touches the memory.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/plan/cache_view.h"
#include "copy/plan/fragment.h"

namespace kvpage {

class CopyGeometry {
 public:
  // shapes: one for all layers, or one a layer.
  // Throws InvalidArgument if numbers of layers or dimensions differ, if a block id would not fit 31 bits, if the
  // destination overlaps itself, or if source and destination overlap without being the same memory of one shape.
  CopyGeometry(const std::vector<BlockShape>& shapes, const CacheView& src, const CacheView& dst);

  const std::vector<Fragment>& fragments() const { return fragments_; }  // sorted by source address
  int64_t num_src_blocks() const { return num_src_blocks_; }
  int64_t num_dst_blocks() const { return num_dst_blocks_; }
  int64_t block_bytes() const { return block_bytes_; }  // of one block in all layers
  bool same_memory() const { return same_memory_; }     // source and destination are one cache
  bool fills_steps() const { return fills_steps_; }     // blocks b and b + 1 adjoin in every fragment, on both sides

 private:
  void check_overlap(const CacheView& src, const CacheView& dst);

  std::vector<Fragment> fragments_;
  int64_t num_src_blocks_, num_dst_blocks_, block_bytes_ = 0;
  bool same_memory_ = false, fills_steps_ = true;
};

}  // namespace kvpage
