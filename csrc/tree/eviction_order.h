// EvictionOrder: which unpinned node loses its blocks next, in the device tier and in the host tier.
//
//      of one priority:     oldest                                                newest
//        use                | h | h | h | d |   | hd | d |   | h | hd | d | ...      every unpinned node, by last use
//        first on device                  ^
//        host_use           | h | h | h |       | hd |       | h | hd |              those with host blocks, same order
//
// (d: has device blocks, h: has host blocks.) Lower priorities go first; below all of them is what was put first. Both orders are orders of last use and nothing
// else: a block that moves from the device to the host keeps its place. That costs O(1) since it is the first on the
// device: all before it are on the host, so its place in `host_use` is right after its neighbour.
//
// "First on device" only moves forward, since nodes get device blocks while they are pinned and are then the newest:
// each node is passed once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "tree/lru_list.h"

namespace kvpage {

constexpr int kNumPriorities = 8;

class EvictionOrder {
 public:
  // Of these lists, what is in the first one goes first. No node is in an earlier one than a node beneath it.
  static constexpr int kNumLists = kNumPriorities - kFirstToGo;
  static int list_of(const TreeNode* node) { return node->priority - kFirstToGo; }

  // Null if no unpinned node has a block in the tier.
  TreeNode* first_on_device() const { return first(&Class::on_device); }
  TreeNode* first_on_host() const {
    for (const Class& list : classes_)
      if (list.host_use.oldest()) return list.host_use.oldest();
    return nullptr;
  }

  // Returns whether listed node `a` loses its blocks before listed node `b`.
  static bool before(const TreeNode* a, const TreeNode* b) {
    return list_of(a) != list_of(b) ? list_of(a) < list_of(b) : a->used_at < b->used_at;
  }

  // The clock counts uses; from now on it also keeps up with the time, if a function is given.
  void keep_time(int64_t (*now)()) { now_ = now; }

  // Begins a use of nodes that push_newest is called for next. It leaves a gap in the clock before them.
  void begin_use() noexcept {
    ++clock_;
    if (now_) clock_ = std::max(clock_, static_cast<uint64_t>(now_()));
  }

  // Returns whether the use that a node's child was last in, at `used_at`, is the node's last one, too.
  static bool of_one_use(uint64_t used_at, const TreeNode* node) { return node->used_at <= used_at + 1; }

  // The node that was used last of all. Its list stays what it is while it is listed.
  void push_newest(TreeNode* node) noexcept {
    Class& list = of(node);
    node->used_at = ++clock_;
    list.use.push_newest(node);
    if (node->num_host_blocks > 0) list.host_use.push_newest(node);
    if (!list.on_device && node->num_device_blocks() > 0) list.on_device = node;
  }

  void remove(TreeNode* node) noexcept {
    Class& list = of(node);
    if (list.on_device == node) advance(list);
    if (node->num_host_blocks > 0) list.host_use.remove(node);
    list.use.remove(node);
  }

  // After `upper` was cut off the front of the listed `lower`, which had `num_host_blocks` before.
  void split(TreeNode* lower, TreeNode* upper, bool had_host_blocks) noexcept {
    Class& list = of(lower);
    upper->used_at = lower->used_at;
    list.use.insert_after(lower, upper);
    if (list.on_device == lower && lower->num_device_blocks() == 0) list.on_device = upper;
    if (!had_host_blocks) return;
    if (upper->num_host_blocks > 0) list.host_use.insert_after(lower, upper);
    if (lower->num_host_blocks == 0) list.host_use.remove(lower);
  }

  // The first on the device has got its first host block.
  void enter_host(TreeNode* node) noexcept {
    Class& list = of(node);
    list.host_use.insert_after(list.use.older(node), node);
  }

  // The node has lost its last host block.
  void leave_host(TreeNode* node) noexcept { of(node).host_use.remove(node); }

  // The node has lost its last device block.
  void leave_device(TreeNode* node) noexcept {
    Class& list = of(node);
    if (list.on_device == node) advance(list);
  }

  static const TreeNode* newer(const TreeNode* node) { return UseList::newer(node); }
  static const TreeNode* newer_on_host(const TreeNode* node) { return HostList::newer(node); }
  static const TreeNode* older(const TreeNode* node) { return UseList::older(node); }
  const TreeNode* newest(int list) const { return classes_[list].use.newest(); }
  const TreeNode* oldest(int list) const { return classes_[list].use.oldest(); }
  const TreeNode* oldest_on_host(int list) const { return classes_[list].host_use.oldest(); }
  TreeNode* newest_on_host(int list) const { return classes_[list].host_use.newest(); }
  const TreeNode* first_on_device(int list) const { return classes_[list].on_device; }

 private:
  using UseList = LruList<&TreeNode::use>;
  using HostList = LruList<&TreeNode::host_use>;

  struct Class {
    UseList use;
    HostList host_use;
    TreeNode* on_device = nullptr;
  };

  Class& of(const TreeNode* node) { return classes_[list_of(node)]; }

  TreeNode* first(TreeNode* Class::* member) const {
    for (const Class& list : classes_)
      if (list.*member) return list.*member;
    return nullptr;
  }

  static void advance(Class& list) noexcept {
    do {
      list.on_device = UseList::newer(list.on_device);
    } while (list.on_device && list.on_device->num_device_blocks() == 0);
  }

  std::array<Class, kNumLists> classes_;
  uint64_t clock_ = 0;
  int64_t (*now_)() = nullptr;  // the time, nanoseconds
};

}  // namespace kvpage
