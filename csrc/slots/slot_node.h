// SlotNode: one edge of a SlotTree with the point where it ends; SlotHolder: a slot whose sequence ends there.
//
//      parent
//        |  tokens         at least one, except for the root, which has no edge
//      node -- holders     the slots that hold exactly the path to here, the latest first
//      /  \                children: those with a holder at or below them first, so that from any node
//                          the way to a holder is to go on to the first child
#pragma once

#include <cstdint>

#include "base/int32_run.h"
#include "slots/linked_list.h"

namespace kvpage {

struct SlotNode;

struct SlotHolder {
  int64_t slot;
  int64_t version = 0;
  SlotNode* node = nullptr;
  Link<SlotHolder> neighbours;  // in the node's list
};

struct SlotNode {
  SlotNode* parent = nullptr;  // null for the root, and only there
  Int32Run tokens;
  int64_t num_pins = 0;      // pins that end here or below
  int64_t num_ends = 0;      // pins that end here
  int64_t num_holders = 0;   // slots whose sequence ends here or below
  int64_t num_children = 0;
  Link<SlotNode> siblings;   // in the parent's list
  Link<SlotNode> ages;       // in the list of last use, while the node is unpinned
  LinkedList<SlotNode, &SlotNode::siblings> children;
  LinkedList<SlotHolder, &SlotHolder::neighbours> holders;

  bool is_root() const { return parent == nullptr; }
};

}  // namespace kvpage
