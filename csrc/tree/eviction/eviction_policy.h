// EvictionPolicy: what a cached node is worth, for the policies that weigh nodes; see RankedOrder, which asks them.
//
// A policy puts each node into one of kNumClasses when it is listed. Within a class the worth must have its least at
// the first or the last of the nodes by TreeNode::rank_key, so that a victim costs two questions a class, not one a
// node.
#pragma once

#include <cstdint>

#include "tree/nodes/tree_node.h"

namespace kvpage {

class EvictionPolicy {
 public:
  static constexpr int kNumClasses = 40;

  virtual ~EvictionPolicy() = default;

  // The class of a node that is about to be listed.
  virtual int class_of(const TreeNode& node) const = 0;

  // What it is worth to keep a block of the listed node; the least goes first. `now`: nanoseconds, as used_at.
  virtual double worth(const TreeNode& node, int64_t now) const = 0;

  // A listed node is found again.
  virtual void reused(const TreeNode& node, int64_t now) noexcept = 0;

  // That many blocks of a listed node were evicted and are in no tier any more.
  virtual void forgotten(const TreeNode& node, int64_t num_blocks, int64_t now) noexcept = 0;

  // Nodes with so many blocks more, or fewer, are listed.
  virtual void listed(const TreeNode& node, int64_t num_blocks) noexcept = 0;
};

}  // namespace kvpage
