#include "states/anchor_table.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "base/check.h"

namespace kvpage {

namespace {

constexpr const char* kIdNames[] = {"device id", "host id"};

void check_path(std::span<const int32_t> device_ids, std::span<const int32_t> host_ids) {
  check(device_ids.size() == host_ids.size(), "ids must be as many of both tiers, got ", device_ids.size(), " and ",
        host_ids.size());
}

}  // namespace

AnchorTable::AnchorTable(std::shared_ptr<BlockPool> device, std::shared_ptr<BlockPool> host, int64_t most)
    : pools_{std::move(device), std::move(host)} {
  check(most >= 0 && most <= std::numeric_limits<int32_t>::max(), "most must be between 0 and 2**31 - 1, got ", most);
  for (int tier : kTiers) by_id_[tier].assign(static_cast<size_t>(pools_[tier]->num_blocks()), kNone);
  anchors_.resize(static_cast<size_t>(most));
  free_.reserve(anchors_.size());
  for (int64_t anchor = most; anchor-- > 0;) free_.push_back(static_cast<int32_t>(anchor));
}

void AnchorTable::check_anchor(int64_t anchor) const {
  const bool is_in_use =
      anchor >= 0 && anchor < static_cast<int64_t>(anchors_.size()) && anchors_[static_cast<size_t>(anchor)].is_in_use;
  check(is_in_use, "anchor must be one in use, got ", anchor);
}

void AnchorTable::check_id(int tier, int64_t block_id) const {
  const auto num_blocks = static_cast<int64_t>(by_id_[tier].size());
  check(block_id >= kNone && block_id < num_blocks, kIdNames[tier],
        " must be between -1 and num_blocks - 1 = ", num_blocks - 1, ", got ", block_id);
}

int64_t AnchorTable::add(bool has_block) {
  std::lock_guard lock(mutex_);
  check(!free_.empty(), "anchors must be at most ", anchors_.size(), ", which are in use");
  const int32_t anchor = free_.back();
  free_.pop_back();
  anchors_[anchor].is_in_use = true;
  anchors_[anchor].has_block = has_block;
  return anchor;
}

void AnchorTable::remove(int64_t anchor) {
  std::lock_guard lock(mutex_);
  check_anchor(anchor);
  for (int tier : kTiers) forget_id(tier, anchors_[anchor]);
  anchors_[anchor] = {};
  free_.push_back(static_cast<int32_t>(anchor));  // there is room: it was there before
}

// --- ids ---

uint32_t AnchorTable::generation(int tier, int32_t block_id) const {
  uint32_t found = 0;
  pools_[tier]->copy_generations({&block_id, 1}, {&found, 1});
  return found;
}

bool AnchorTable::is_current(int tier, const Anchor& anchor) const {
  const int32_t block_id = anchor.ids[tier];
  return block_id != kNone && generation(tier, block_id) == anchor.generations[tier];
}

// Whether the anchor's block has its id now, or had it until the move that is told of made the id free.
bool AnchorTable::was_current(int tier, const Anchor& anchor) const {
  const uint32_t now = generation(tier, anchor.ids[tier]);
  return anchor.generations[tier] == now || anchor.generations[tier] == now - 1;
}

void AnchorTable::use(int tier, int32_t anchor, int32_t block_id) {
  const uint32_t now = generation(tier, block_id);
  if (now % 2 == 0) return;  // it is free already
  if (const int32_t before = by_id_[tier][block_id]; before != kNone) forget_id(tier, anchors_[before]);
  forget_id(tier, anchors_[anchor]);
  anchors_[anchor].ids[tier] = block_id;
  anchors_[anchor].generations[tier] = now;
  by_id_[tier][block_id] = anchor;
}

void AnchorTable::forget_id(int tier, Anchor& anchor) noexcept {
  if (anchor.ids[tier] != kNone) by_id_[tier][anchor.ids[tier]] = kNone;
  anchor.ids[tier] = kNone;
}

void AnchorTable::learn(int64_t anchor, int64_t device_id, int64_t host_id) {
  std::lock_guard lock(mutex_);
  check_anchor(anchor);
  check_id(kDevice, device_id);
  check_id(kHost, host_id);
  check(anchors_[anchor].has_block, "anchor must be one of a block, got ", anchor);
  const std::array<int64_t, 2> ids{device_id, host_id};
  for (int tier : kTiers) {
    if (ids[tier] == kNone || (at(tier, ids[tier]) == anchor && is_current(tier, anchors_[anchor]))) continue;
    use(tier, static_cast<int32_t>(anchor), static_cast<int32_t>(ids[tier]));
  }
}

void AnchorTable::moved(std::span<const TierPair> pairs, bool to_host) noexcept {
  std::lock_guard lock(mutex_);
  const int source = to_host ? kDevice : kHost, target = to_host ? kHost : kDevice;
  for (const auto& [from, to] : pairs) {
    const int32_t anchor = by_id_[source][from];
    if (anchor != kNone && was_current(source, anchors_[anchor])) use(target, anchor, to);
  }
}

void AnchorTable::move(std::span<const TierPair> pairs, bool to_host) {
  for (const auto& [from, to] : pairs) {
    const std::array<int32_t, 2> ids{to_host ? from : to, to_host ? to : from};
    for (int tier : kTiers) check(ids[tier] != kNone, kIdNames[tier], " must not be -1"), check_id(tier, ids[tier]);
  }
  moved(pairs, to_host);
}

// --- looking up ---

int32_t AnchorTable::find_locked(int64_t device_id, int64_t host_id) const {
  if (const int32_t found = at(kDevice, device_id); found != kNone && is_current(kDevice, anchors_[found]))
    return found;
  if (const int32_t found = at(kHost, host_id); found != kNone && is_current(kHost, anchors_[found])) return found;
  return kNone;
}

int64_t AnchorTable::find(int64_t device_id, int64_t host_id) const {
  std::lock_guard lock(mutex_);
  check_id(kDevice, device_id);
  check_id(kHost, host_id);
  return find_locked(device_id, host_id);
}

void AnchorTable::find_each(std::span<const int32_t> device_ids, std::span<const int32_t> host_ids,
                            std::span<int32_t> anchors) const {
  check_path(device_ids, host_ids);
  check(anchors.size() == device_ids.size(), "anchors must be as many as the ids, got ", anchors.size());
  std::lock_guard lock(mutex_);
  for (size_t place = 0; place < device_ids.size(); ++place) {
    check_id(kDevice, device_ids[place]);
    check_id(kHost, host_ids[place]);
    anchors[place] = find_locked(device_ids[place], host_ids[place]);
  }
}

std::pair<int64_t, int64_t> AnchorTable::find_last(std::span<const int32_t> device_ids,
                                                   std::span<const int32_t> host_ids) const {
  check_path(device_ids, host_ids);
  std::lock_guard lock(mutex_);
  for (size_t place = device_ids.size(); place-- > 0;) {
    check_id(kDevice, device_ids[place]);
    check_id(kHost, host_ids[place]);
    const int32_t found = find_locked(device_ids[place], host_ids[place]);
    if (found != kNone) return {static_cast<int64_t>(place), found};
  }
  return {kNone, kNone};
}

bool AnchorTable::is_valid(int64_t anchor) const {
  bool valid = false;
  check(anchor >= kNone && anchor <= std::numeric_limits<int32_t>::max(), "anchor must be one in use, got ", anchor);
  const auto wanted = static_cast<int32_t>(anchor);
  are_valid({&wanted, 1}, {&valid, 1});
  return valid;
}

void AnchorTable::are_valid(std::span<const int32_t> anchors, std::span<bool> valid) const {
  check(anchors.size() == valid.size(), "valid must be as many as the anchors, got ", valid.size());
  std::lock_guard lock(mutex_);
  for (const int32_t anchor : anchors) check_anchor(anchor);
  for (size_t i = 0; i < anchors.size(); ++i) {
    const Anchor& one = anchors_[anchors[i]];
    valid[i] = !one.has_block || is_current(kDevice, one) || is_current(kHost, one);
  }
}

std::vector<int64_t> AnchorTable::stale() const {
  std::lock_guard lock(mutex_);
  std::vector<bool> is_valid(anchors_.size());
  for (int tier : kTiers) {
    std::vector<int32_t> with_id, ids;
    for (size_t i = 0; i < anchors_.size(); ++i) {
      if (anchors_[i].ids[tier] == kNone) continue;
      with_id.push_back(static_cast<int32_t>(i));
      ids.push_back(anchors_[i].ids[tier]);
    }
    std::vector<uint32_t> now(ids.size());
    pools_[tier]->copy_generations(ids, now);  // one lock for all
    for (size_t i = 0; i < ids.size(); ++i)
      if (now[i] == anchors_[with_id[i]].generations[tier]) is_valid[with_id[i]] = true;
  }
  std::vector<int64_t> found;
  for (size_t i = 0; i < anchors_.size(); ++i)
    if (anchors_[i].is_in_use && anchors_[i].has_block && !is_valid[i]) found.push_back(static_cast<int64_t>(i));
  return found;
}

std::vector<AnchorTable::Use> AnchorTable::uses_of(int64_t anchor) const {
  std::lock_guard lock(mutex_);
  check_anchor(anchor);
  const Anchor& one = anchors_[anchor];
  std::vector<Use> uses;
  for (int tier : kTiers)
    if (one.ids[tier] != kNone) uses.push_back({tier, one.ids[tier], one.generations[tier]});
  return uses;
}

bool AnchorTable::is_current(int64_t tier, int64_t block_id, uint32_t generation) const {
  check(tier == kDevice || tier == kHost, "tier must be 0 or 1, got ", tier);
  check_id(static_cast<int>(tier), block_id);
  return block_id != kNone && this->generation(static_cast<int>(tier), static_cast<int32_t>(block_id)) == generation;
}

// --- for tests ---

void AnchorTable::check_invariants() const {
  std::lock_guard lock(mutex_);
  size_t num_free = 0;
  for (size_t i = 0; i < anchors_.size(); ++i) {
    const Anchor& one = anchors_[i];
    num_free += !one.is_in_use;
    for (int tier : kTiers) {
      if (one.ids[tier] == kNone) continue;
      if (!one.is_in_use || !one.has_block)
        throw std::runtime_error("anchor " + std::to_string(i) + " has an id, and no block");
      if (by_id_[tier][one.ids[tier]] != static_cast<int32_t>(i))
        throw std::runtime_error("anchor " + std::to_string(i) + " is not found by its " + kIdNames[tier]);
    }
  }
  if (num_free != free_.size()) throw std::runtime_error("another number of anchors is free");
  for (int tier : kTiers)
    for (size_t id = 0; id < by_id_[tier].size(); ++id)
      if (const int32_t anchor = by_id_[tier][id];
          anchor != kNone && anchors_[anchor].ids[tier] != static_cast<int32_t>(id))
        throw std::runtime_error(std::string(kIdNames[tier]) + " " + std::to_string(id) +
                                 " finds another block's anchor");
}

}  // namespace kvpage
