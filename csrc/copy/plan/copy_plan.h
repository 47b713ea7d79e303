// CopyGeometry and CopyPlan: every movement of blocks, as pieces of memory times pairs of block ids.
//
//   one block of all layers, as the source and the destination hold it     pairs        runs (when every piece
//                                                                                       fills its block step)
//   piece 0   src ────────┐  dst ────────┐   layer 0, K                    (3, 7)  ┐
//   piece 1   src ────────┤  dst ────────┤   layer 0, V                    (4, 8)  ┴─►  {3, 7, count 2}
//   piece 2   src ────────┘  dst ────────┘   layer 1, K                    (9, 1)  ──►  {9, 1, count 1}
//
// A piece is a run of bytes that is contiguous on both sides: dimensions that are dense in source and destination
// alike are collapsed, and neighbours are merged across dimensions and layers, so a packed slab gives one piece.
// Block b of a piece lies at piece.src + b * piece.src_step. An extent, the unit that executors copy, is a run times a
// piece. Extents are enumerated and never stored: there can be millions.
//
// The geometry is made once for a pair of caches and checked then; a plan is made for each mapping. Neither owns or
// touches the memory that it describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "copy/sm_kernel/copy_thread.h"

namespace kvpage {

// One layer's tensor. `strides` are in bytes, one for each dimension of the shape that all layers share.
struct LayerView {
  Address address;
  std::vector<int64_t> strides;
};

struct CacheView {
  std::vector<LayerView> layers;
  int64_t num_blocks;
};

struct BlockShape {
  std::vector<int64_t> sizes;  // of the generic shape; the entry of the block dimension is not read
  int block_dim;
  int64_t element_bytes;
};

class CopyGeometry {
 public:
  // Throws InvalidArgument if numbers of layers or dimensions differ, if a block id would not fit 31 bits, if the
  // destination overlaps itself, or if source and destination overlap without being the same memory of one shape.
  CopyGeometry(const BlockShape& shape, const CacheView& src, const CacheView& dst);

  const std::vector<Piece>& pieces() const { return pieces_; }  // sorted by source address
  int64_t num_src_blocks() const { return num_src_blocks_; }
  int64_t num_dst_blocks() const { return num_dst_blocks_; }
  int64_t block_bytes() const { return block_bytes_; }  // of one block in all layers
  bool same_memory() const { return same_memory_; }     // source and destination are one cache
  bool fills_steps() const { return fills_steps_; }     // blocks b and b + 1 adjoin in every piece, on both sides

 private:
  void check_overlap(const CacheView& src, const CacheView& dst);

  std::vector<Piece> pieces_;
  int64_t num_src_blocks_, num_dst_blocks_, block_bytes_ = 0;
  bool same_memory_ = false, fills_steps_ = true;
};

// Blocks src_id ... src_id + count - 1 become dst_id ... dst_id + count - 1.
struct BlockRun {
  int64_t src_id, dst_id, count;
};

class CopyPlan {
 public:
  // `pairs` is [num_pairs, 2] of (source id, destination id). Throws InvalidArgument for an id out of range, for a
  // destination named twice, and, where both sides are one cache, for a block that one pair reads and another writes:
  // extents never depend on each other. Pairs of a block with itself are dropped there. `geometry` must outlive the plan.
  CopyPlan(const CopyGeometry& geometry, const int64_t* pairs, int64_t num_pairs);

  const CopyGeometry& geometry() const { return geometry_; }
  const std::vector<BlockPair>& pairs() const { return pairs_; }  // sorted by source
  const std::vector<BlockRun>& runs() const { return runs_; }
  int64_t num_bytes() const { return static_cast<int64_t>(pairs_.size()) * geometry_.block_bytes(); }
  int64_t num_extents() const { return static_cast<int64_t>(runs_.size() * geometry_.pieces().size()); }

  // visit(src address, dst address, bytes) for each extent of the plan, as far as it lies in bytes [begin, end) of the
  // plan's order: shares of equal size cut an extent where they must.
  template <typename Visit>
  void for_each(int64_t begin, int64_t end, const Visit& visit) const {
    int64_t at = 0;
    for (const BlockRun& run : runs_) {
      if (at >= end) return;
      const int64_t run_bytes = run.count * geometry_.block_bytes();
      if (at + run_bytes > begin) visit_run(run, begin - at, end - at, visit);
      at += run_bytes;
    }
  }

 private:
  void read_pairs(const int64_t* pairs, int64_t num_pairs);
  void merge_runs();

  template <typename Visit>
  void visit_run(const BlockRun& run, int64_t begin, int64_t end, const Visit& visit) const {
    int64_t at = 0;
    for (const Piece& piece : geometry_.pieces()) {
      const int64_t bytes = run.count * piece.bytes;
      const int64_t from = std::max<int64_t>(begin - at, 0), to = std::min(end - at, bytes);
      if (from < to) {
        visit(piece.src + run.src_id * piece.src_step + from, piece.dst + run.dst_id * piece.dst_step + from, to - from);
      }
      at += bytes;
    }
  }

  const CopyGeometry& geometry_;
  std::vector<BlockPair> pairs_;
  std::vector<BlockRun> runs_;
};

}  // namespace kvpage
