// AnchorTable: the cached blocks that something stands on ("anchors"), by their ids in both tiers. A checkpoint of a
// state does, and a block of a window.
//
//      by id    device  [ .  .  2  .  .  0 ]         anchor 0   device 5 @ 7                  @: the generation
//               host    [ .  2  .  1 ]               anchor 1                  host 3 @ 1
//                                                    anchor 2   device 2 @ 3 | host 1 @ 9     valid while one of the
//                                                    anchor 3   of no block                   two has this generation
//
// A cached block stands for an exact prefix, and its id does so as long as its generation is the same. So no token of
// the prefix is read again. The start of a namespace is an anchor of no block, which is always valid.
//
// Every call holds the table's mutex, and those of the pools come after it; is_current of a use reads a pool alone. One
// that throws has changed nothing.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "pool/block_pool.h"
#include "pool/block_watcher.h"

namespace kvpage {

class AnchorTable final : public BlockWatcher {
 public:
  enum Tier { kDevice = 0, kHost = 1 };
  static constexpr int32_t kNone = -1;  // no anchor, and no id

  // What names one use of a block.
  struct Use {
    int tier;
    int32_t block_id;
    uint32_t generation;
  };

  // Anchors 0 to most - 1, none of them in use. InvalidArgument unless 0 <= most < 2^31.
  AnchorTable(std::shared_ptr<BlockPool> device, std::shared_ptr<BlockPool> host, int64_t most);

  // Returns a new anchor without ids. InvalidArgument if all are in use.
  int64_t add(bool has_block);

  // Forgets an anchor. InvalidArgument here and below if it is not in use.
  void remove(int64_t anchor);

  // Returns the valid anchor of the block with these ids, kNone for one that it lacks; kNone if there is no anchor.
  // InvalidArgument here and below for an id that is out of range.
  int64_t find(int64_t device_id, int64_t host_id) const;

  // Learns the ids that an anchor's block has now. One that is free already is none. InvalidArgument for an anchor of
  // no block.
  void learn(int64_t anchor, int64_t device_id, int64_t host_id);

  // Returns the last place of a path that has a valid anchor, and this anchor; (kNone, kNone) without one. Both are the
  // ids of the path's blocks, with kNone where a tier lacks one.
  std::pair<int64_t, int64_t> find_last(std::span<const int32_t> device_ids, std::span<const int32_t> host_ids) const;

  // Writes the valid anchor of each of a path's blocks, or kNone, to `anchors`, which has as many places as the path.
  void find_each(std::span<const int32_t> device_ids, std::span<const int32_t> host_ids,
                 std::span<int32_t> anchors) const;

  // Learns the ids of blocks that have just got a copy in the other tier.
  void moved(std::span<const TierPair> pairs, bool to_host) noexcept override;

  // The same for pairs of another than the tree. InvalidArgument for an id that is out of range.
  void move(std::span<const TierPair> pairs, bool to_host);

  bool is_valid(int64_t anchor) const;

  // Writes whether each anchor is valid to `valid`, which has as many places. InvalidArgument for one not in use.
  void are_valid(std::span<const int32_t> anchors, std::span<bool> valid) const;

  // Returns the anchors whose block is in no tier any more.
  std::vector<int64_t> stale() const;

  // Returns the ids that the anchor's block has, or had.
  std::vector<Use> uses_of(int64_t anchor) const;

  // Returns whether the id still names the block that had it in that generation. InvalidArgument for another tier.
  bool is_current(int64_t tier, int64_t block_id, uint32_t generation) const;

  // Throws std::runtime_error that names the broken invariant. O(blocks).
  void check_invariants() const;

 private:
  struct Anchor {
    std::array<int32_t, 2> ids{kNone, kNone};
    std::array<uint32_t, 2> generations{};
    bool is_in_use = false;
    bool has_block = false;
  };

  static constexpr int kTiers[] = {kDevice, kHost};

  void check_anchor(int64_t anchor) const;
  void check_id(int tier, int64_t block_id) const;
  uint32_t generation(int tier, int32_t block_id) const;
  bool is_current(int tier, const Anchor& anchor) const;
  bool was_current(int tier, const Anchor& anchor) const;
  int32_t at(int tier, int64_t block_id) const { return block_id < 0 ? kNone : by_id_[tier][block_id]; }
  int32_t find_locked(int64_t device_id, int64_t host_id) const;
  void use(int tier, int32_t anchor, int32_t block_id);
  void forget_id(int tier, Anchor& anchor) noexcept;

  mutable std::mutex mutex_;
  std::array<std::shared_ptr<BlockPool>, 2> pools_;
  std::array<std::vector<int32_t>, 2> by_id_;  // the anchor of each block
  std::vector<Anchor> anchors_;
  std::vector<int32_t> free_;  // the next one to hand out stands last
};

}  // namespace kvpage
