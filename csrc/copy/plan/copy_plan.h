// CopyPlan: which bytes one swap or copy of blocks moves, from where to where.
//
//   fragments of a block (copy_geometry.h)     pairs        runs (when every fragment fills its block step)
//
//   fragment 0   src ──► dst                    (3, 7)  ┐
//   fragment 1   src ──► dst                    (4, 8)  ┴─►  {3, 7, count 2}
//   fragment 2   src ──► dst                    (9, 1)  ──►  {9, 1, count 1}
//
// Block b of a fragment begins at fragment.src + b * fragment.src_step. An extent, the unit that executors copy, is a
// run times a fragment. Extents are enumerated and never stored: there can be millions.
//
// A plan is made for each mapping. It neither owns nor touches the memory that it describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copy/plan/copy_geometry.h"
#include "copy/plan/fragment.h"

namespace kvpage {

// Blocks src_id ... src_id + count - 1 become dst_id ... dst_id + count - 1.
struct BlockRun {
  int64_t src_id, dst_id, count;
};

class CopyPlan {
 public:
  // `pairs` is [num_pairs, 2] of (source id, destination id). Throws InvalidArgument for an id out of range, for a
  // destination named twice, and, where both sides are one cache, for a block that one pair reads and another writes:
  // extents never depend on each other. Pairs of a block with itself are dropped there. `geometry` must outlive the
  // plan.
  CopyPlan(const CopyGeometry& geometry, const int64_t* pairs, int64_t num_pairs);

  const CopyGeometry& geometry() const { return geometry_; }
  const std::vector<BlockPair>& pairs() const { return pairs_; }  // sorted by source
  const std::vector<BlockRun>& runs() const { return runs_; }
  int64_t num_bytes() const { return static_cast<int64_t>(pairs_.size()) * geometry_.block_bytes(); }
  int64_t num_extents() const { return static_cast<int64_t>(runs_.size() * geometry_.fragments().size()); }

  // visit(src address, dst address, bytes) for each extent of the plan, as far as it is in bytes [begin, end) of the
  // plan's order. Shares of equal size cut an extent where they must.
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
    for (const Fragment& fragment : geometry_.fragments()) {
      const int64_t bytes = run.count * fragment.bytes;
      const int64_t from = std::max<int64_t>(begin - at, 0), to = std::min(end - at, bytes);
      if (from < to) {
        visit(fragment.src + run.src_id * fragment.src_step + from,
              fragment.dst + run.dst_id * fragment.dst_step + from, to - from);
      }
      at += bytes;
    }
  }

  const CopyGeometry& geometry_;
  std::vector<BlockPair> pairs_;
  std::vector<BlockRun> runs_;
};

}  // namespace kvpage
