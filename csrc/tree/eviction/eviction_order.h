// EvictionOrder: which unpinned node loses its blocks next, in the device tier and in the host tier.
//
//      of one priority:     oldest                                                newest
//        use                | h | h | h | d |   | hd | d |   | h | hd | d | ...      every unpinned node, by last use
//        first on device                  ^
//        host_use           | h | h | h |       | hd |       | h | hd |              those with host blocks, same order
//
// (d: has device blocks, h: has host blocks.) Lower priorities go first; below all of them is what was put first. Both
// orders are orders of last use and nothing else: a block that moves from the device to the host keeps its place. That
// costs O(1) since it is the first on the device: all before it are on the host, so its place in `host_use` is right
// after its neighbour.
//
// "First on device" only moves forward, since nodes get device blocks while they are pinned and are then the newest:
// each node is passed once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "pool/eviction/plain_policies.h"
#include "pool/eviction/use_clock.h"
#include "tree/eviction/lru_list.h"
#include "tree/eviction/ranked_order.h"

namespace kvpage {

class EvictionOrder {
 public:
  // Of these lists, what is in the first one goes first. No node is in an earlier one than a node beneath it.
  static constexpr int kNumLists = kNumPriorities - kFirstToGo;
  static int list_of(const TreeNode* node) { return node->priority - kFirstToGo; }

  // LruPolicy is what the lists do, in O(1): of one list, the least recently used node goes first.
  explicit EvictionOrder(std::unique_ptr<EvictionPolicy> policy) {
    if (dynamic_cast<const LruPolicy*>(policy.get())) return;
    ranks_ = std::make_unique<RankedOrder>(std::move(policy));
    clock_.keep_time(true);
  }

  // Null if no unpinned node has a block in the tier.
  TreeNode* first_on_device() const {
    return ranks_ ? ranks_->first_on_device(clock_.now()) : first(&Class::on_device);
  }
  TreeNode* first_on_host() const {
    if (ranks_) return ranks_->first_on_host(clock_.now());
    for (const Class& list : classes_)
      if (list.host_use.oldest()) return list.host_use.oldest();
    return nullptr;
  }

  // Returns whether listed node `a` loses its blocks before listed node `b`.
  bool before(const TreeNode* a, const TreeNode* b) const {
    if (ranks_) return ranks_->before(a, b, clock_.now());
    return list_of(a) != list_of(b) ? list_of(a) < list_of(b) : a->used_at < b->used_at;
  }

  // Whether it weighs nodes, so that blocks on the host may have been used later than those on the device.
  bool is_ranked() const { return ranks_ != nullptr; }

  const UseClock& clock() const { return clock_; }

  // The clock counts uses; it also keeps up with the time if that is told here, or a policy needs it.
  void keep_time(bool keeps_time) { clock_.keep_time(keeps_time || ranks_); }
  void set_time(int64_t nanoseconds) { clock_.set_time(nanoseconds); }

  // Begins a use of nodes that push_newest is called for next.
  void begin_use() noexcept { clock_.begin_use(); }

  // Returns whether the use that a node's child was last in, at `used_at`, is the node's last one, too.
  static bool of_one_use(uint64_t used_at, const TreeNode* node) { return node->used_at <= used_at + 1; }

  // The node that was used last of all. Its list stays what it is while it is listed.
  void push_newest(TreeNode* node) noexcept {
    Class& list = of(node);
    node->used_at = clock_.tick();
    list.use.push_newest(node);
    if (ranks_) return ranks_->list(node, clock_.now());
    if (node->num_host_blocks > 0) list.host_use.push_newest(node);
    if (!list.on_device && node->num_device_blocks() > 0) list.on_device = node;
  }

  void remove(TreeNode* node) noexcept {
    Class& list = of(node);
    if (ranks_) {
      ranks_->unlist(node);
    } else {
      if (list.on_device == node) advance(list);
      if (node->num_host_blocks > 0) list.host_use.remove(node);
    }
    list.use.remove(node);
  }

  // A node that was listed is pinned next: it is found again.
  void reuse(TreeNode* node) noexcept {
    if (ranks_) ranks_->reuse(node, clock_.now());
  }

  // A listed node is about to lose that many blocks for ever, since room is needed.
  void forget(TreeNode* node, int64_t num_blocks) noexcept {
    if (ranks_) ranks_->forget(node, num_blocks, clock_.now());
  }

  // The node is about to leave the tree, and its parent.
  void leave_tree(TreeNode* node) noexcept {
    if (ranks_) ranks_->refresh(node, false, false, clock_.now());
  }

  // After `upper` was cut off the front of `lower`, which had host blocks before or not. They are listed unless pinned.
  void split(TreeNode* lower, TreeNode* upper, bool had_host_blocks) noexcept {
    const bool is_listed = lower->num_pins == 0;
    Class& list = of(lower);
    if (is_listed) {
      upper->used_at = lower->used_at;
      list.use.insert_after(lower, upper);
    }
    if (ranks_) return ranks_->split(lower, upper);
    if (!is_listed) return;
    if (list.on_device == lower && lower->num_device_blocks() == 0) list.on_device = upper;
    if (!had_host_blocks) return;
    if (upper->num_host_blocks > 0) list.host_use.insert_after(lower, upper);
    if (lower->num_host_blocks == 0) list.host_use.remove(lower);
  }

  // A node that is pinned or new has got blocks of a tier, or has lost its last one.
  void fill(TreeNode* node) noexcept {
    if (ranks_) refresh(node);
  }

  // The first on the device has got its first host block.
  void enter_host(TreeNode* node) noexcept {
    if (ranks_) return refresh(node);
    Class& list = of(node);
    list.host_use.insert_after(list.use.older(node), node);
  }

  // The node has lost its last host block.
  void leave_host(TreeNode* node) noexcept {
    if (ranks_) return refresh(node);
    of(node).host_use.remove(node);
  }

  // The node has lost its last device block.
  void leave_device(TreeNode* node) noexcept {
    if (ranks_) return refresh(node);
    Class& list = of(node);
    if (list.on_device == node) advance(list);
  }

  // When the node is expected to be used again, in nanoseconds of the clock. Only a policy that weighs nodes heeds it.
  void set_next_use(TreeNode* node, int64_t next_use) noexcept {
    if (ranks_) ranks_->set_next_use(node, next_use, clock_.now());
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
  void refresh(TreeNode* node) noexcept {
    ranks_->refresh(node, node->num_device_blocks() > 0, node->num_host_blocks > 0, clock_.now());
  }

  UseClock clock_;
  std::unique_ptr<RankedOrder> ranks_;  // null: the lists alone say which node goes first
};

}  // namespace kvpage
