#include "slots/slot_tree.h"

#include <algorithm>
#include <new>
#include <random>
#include <utility>

#include "base/check.h"

namespace kvpage {
namespace {

uint64_t random_seed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

// The seed keeps callers from aiming at collisions; they would cost time only, since keys are compared as well.
size_t SlotTree::ChildHash::operator()(const ChildKey& key) const {
  uint64_t mixed = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(key.parent)) ^ seed;
  for (const uint64_t word : {static_cast<uint64_t>(key.first_token), seed}) {
    mixed = (mixed ^ word) * 0x9e3779b97f4a7c15ull;
    mixed ^= mixed >> 32;
  }
  return mixed;
}

SlotTree::SlotTree(int64_t max_capacity) : max_capacity_(max_capacity), nodes_(16, ChildHash{random_seed()}) {
  check(max_capacity >= 0, "max_capacity must not be negative, got ", max_capacity);
}

int64_t SlotTree::num_tokens() const {
  std::lock_guard lock(mutex_);
  return num_tokens_;
}

int64_t SlotTree::num_over() const {
  std::lock_guard lock(mutex_);
  return std::max<int64_t>(num_tokens_ - max_capacity_, 0);
}

int64_t SlotTree::num_slots() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(holders_.size());
}

int64_t SlotTree::num_nodes() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(nodes_.size());
}

int64_t SlotTree::num_pins() const {
  std::lock_guard lock(mutex_);
  return root_.num_pins;
}

// --- questions ---

int64_t SlotTree::insert(const TokenView& tokens, int64_t slot, int64_t version) {
  std::lock_guard lock(mutex_);
  check(tokens.size() > 0, "token_ids must not be empty");
  check(slot >= 0, "slot must not be negative, got ", slot);
  tokens.check_fits(0, tokens.size());
  const auto [entry, is_new] = holders_.try_emplace(slot, SlotHolder{slot, 0, nullptr, {}});
  SlotNode* end;
  try {
    end = end_node(tokens);
  } catch (...) {
    if (is_new) holders_.erase(entry);
    throw;
  }
  // From here on nothing throws.
  pin_path(end);
  hold(entry->second, end, version);
  evict();
  return std::max<int64_t>(num_tokens_ - max_capacity_, 0);
}

SlotMatch SlotTree::find(const TokenView& tokens, const SlotAllocator* allocator) {
  std::lock_guard lock(mutex_);
  const Place place = find_locked(tokens, allocator);
  touch_path(place.node);
  return match_at(place);
}

SlotMatch SlotTree::pin(const TokenView& tokens, const SlotAllocator* allocator) {
  std::lock_guard lock(mutex_);
  const Place place = find_locked(tokens, allocator);
  if (place.num_tokens == 0) return {};
  const SlotMatch match = match_at(place);
  pin_path(node_at(place));
  return match;
}

void SlotTree::release(const TokenView& tokens) {
  std::lock_guard lock(mutex_);
  if (tokens.size() == 0) return;
  const Place place = walk(tokens, false);
  const bool is_end = place.num_tokens == tokens.size() && place.in_edge == place.node->tokens.size();
  check(is_end && place.node->num_ends > 0, "token_ids must be those of a pin, none ends after these ", tokens.size());
  unpin_path(place.node);
  tidy(place.node);
  evict();
}

bool SlotTree::withdraw(int64_t slot) {
  std::lock_guard lock(mutex_);
  const auto found = holders_.find(slot);
  if (found == holders_.end()) return false;
  drop_holder(&found->second);
  return true;
}

// --- the structure ---

SlotTree::Place SlotTree::walk(const TokenView& tokens, bool held_only) {
  Place place{&root_, 0, 0};
  while (place.num_tokens < tokens.size() && place.in_edge == place.node->tokens.size()) {
    const auto found = nodes_.find(ChildKey{place.node, tokens.at(place.num_tokens)});
    if (found == nodes_.end() || (held_only && found->second->num_holders == 0)) break;
    SlotNode* child = found->second.get();
    const int64_t most = std::min(child->tokens.size(), tokens.size() - place.num_tokens);
    const int64_t common = tokens.common_prefix(place.num_tokens, child->tokens.data(), most);
    place = {child, common, place.num_tokens + common};
  }
  return place;
}

SlotNode* SlotTree::node_at(const Place& place) {
  return place.in_edge == place.node->tokens.size() ? place.node : split(place.node, place.in_edge);
}

// The node that ends with the tokens; made where it lacks.
SlotNode* SlotTree::end_node(const TokenView& tokens) {
  const Place place = walk(tokens, false);
  SlotNode* node = node_at(place);
  if (place.num_tokens == tokens.size()) return node;
  try {
    return add_leaf(node, tokens, place.num_tokens);
  } catch (...) {
    tidy(node);
    throw;
  }
}

SlotNode* SlotTree::add_leaf(SlotNode* parent, const TokenView& tokens, int64_t start) {
  auto made = std::make_unique<SlotNode>();
  const int64_t num_tokens = tokens.size() - start;
  made->tokens.reserve(num_tokens);
  tokens.copy_to(start, num_tokens, made->tokens.extend(num_tokens));
  made->parent = parent;
  SlotNode* leaf = made.get();
  nodes_.emplace(key_of(leaf), std::move(made));
  // From here on nothing throws.
  parent->children.push_back(leaf);
  ++parent->num_children;
  unpinned_.push_back(leaf);
  num_tokens_ += num_tokens;
  return leaf;
}

// The lower half stays at the node's address, since holders point at the node where they end.
SlotNode* SlotTree::split(SlotNode* node, int64_t at) {
  auto made = std::make_unique<SlotNode>();
  Int32Run copy = node->tokens.copy_smaller_half(at);
  SlotNode* upper = made.get();
  auto& lower_entry = nodes_[ChildKey{upper, node->tokens.data()[at]}];
  // From here on nothing throws.
  lower_entry = std::exchange(nodes_.find(key_of(node))->second, std::move(made));
  upper->parent = node->parent;
  upper->tokens = node->tokens.cut_front(at, std::move(copy));
  upper->num_pins = node->num_pins;
  upper->num_holders = node->num_holders;
  upper->parent->children.insert_after(node, upper);
  upper->parent->children.remove(node);
  upper->children.push_front(node);
  upper->num_children = 1;
  node->parent = upper;
  if (node->num_pins == 0) unpinned_.insert_after(node, upper);
  return upper;
}

// The reverse of split. The joined edge has the upper half's place in the list of last use.
void SlotTree::join_only_child(SlotNode* node) noexcept {
  SlotNode* child = node->children.front();
  try {
    node->tokens.reserve(child->tokens.size());
  } catch (const std::bad_alloc&) {  // two edges do as well
    return;
  }
  const auto upper_entry = nodes_.find(key_of(node)), lower_entry = nodes_.find(key_of(child));
  const auto tokens = child->tokens.span();
  std::copy(tokens.begin(), tokens.end(), node->tokens.extend(child->tokens.size()));
  child->tokens = std::move(node->tokens);
  child->parent = node->parent;
  child->parent->children.insert_after(node, child);
  child->parent->children.remove(node);
  if (node->num_pins == 0) {
    unpinned_.remove(child);
    unpinned_.insert_after(node, child);
    unpinned_.remove(node);
  }
  upper_entry->second = std::move(lower_entry->second);
  nodes_.erase(lower_entry);
}

void SlotTree::erase_leaf(SlotNode* leaf) noexcept {
  SlotNode* parent = leaf->parent;
  parent->children.remove(leaf);
  --parent->num_children;
  if (leaf->num_pins == 0) unpinned_.remove(leaf);
  num_tokens_ -= leaf->tokens.size();
  nodes_.erase(key_of(leaf));
}

// Removes the nodes from this one up that no slot holds and no pin keeps. Joins the others where they need no split.
void SlotTree::tidy(SlotNode* node) noexcept {
  while (!node->is_root() && node->num_holders == 0 && node->num_pins == 0) {
    SlotNode* parent = node->parent;
    erase_leaf(node);
    node = parent;
  }
  const bool is_needed = node->is_root() || node->num_children != 1 || node->num_ends > 0 || node->holders.front();
  if (!is_needed) join_only_child(node);
}

// --- holders ---

SlotTree::Place SlotTree::find_locked(const TokenView& tokens, const SlotAllocator* allocator) {
  if (allocator && !holders_.empty()) {
    const int64_t last = holders_.rbegin()->first;
    check(last < allocator->max_slots(), "allocator must have all slots that were inserted, got one of ",
          allocator->max_slots(), " for slot ", last);
  }
  for (;;) {
    const Place place = walk(tokens, true);
    if (!allocator || place.num_tokens == 0) return place;
    SlotHolder* holder = holder_below(place.node);
    if (allocator->version(holder->slot) == holder->version) return place;
    drop_holder(holder);
  }
}

SlotMatch SlotTree::match_at(const Place& place) const {
  if (place.num_tokens == 0) return {};
  const SlotHolder* holder = holder_below(place.node);
  return {place.num_tokens, holder->slot, holder->version};
}

SlotHolder* SlotTree::holder_below(const SlotNode* node) {
  while (!node->holders.front()) node = node->children.front();
  return node->holders.front();
}

// Requires that `end` is pinned, so that leaving the old place cannot take the new one away.
void SlotTree::hold(SlotHolder& holder, SlotNode* end, int64_t version) noexcept {
  SlotNode* old = holder.node;
  if (old) old->holders.remove(&holder);
  end->holders.push_front(&holder);
  add_holders(end, 1);
  holder.node = end;
  holder.version = version;
  if (!old) return;
  add_holders(old, -1);
  tidy(old);
}

void SlotTree::drop_holder(SlotHolder* holder) noexcept {
  SlotNode* node = holder->node;
  node->holders.remove(holder);
  holders_.erase(holders_.find(holder->slot));
  add_holders(node, -1);
  tidy(node);
}

void SlotTree::add_holders(SlotNode* node, int64_t count) noexcept {
  for (; node; node = node->parent) {
    const bool had = node->num_holders > 0;
    node->num_holders += count;
    const bool has = node->num_holders > 0;
    if (had == has || node->is_root()) continue;
    node->parent->children.remove(node);
    has ? node->parent->children.push_front(node) : node->parent->children.push_back(node);
  }
}

// --- pins, use and eviction ---

void SlotTree::pin_path(SlotNode* end) noexcept {
  ++end->num_ends;
  ++root_.num_pins;
  for (SlotNode* node = end; !node->is_root(); node = node->parent)
    if (node->num_pins++ == 0) unpinned_.remove(node);
}

void SlotTree::unpin_path(SlotNode* end) noexcept {
  --end->num_ends;
  --root_.num_pins;
  for (SlotNode* node = end; !node->is_root(); node = node->parent)
    if (--node->num_pins == 0) unpinned_.push_back(node);
}

void SlotTree::touch_path(SlotNode* end) noexcept {
  for (SlotNode* node = end; !node->is_root(); node = node->parent) {
    if (node->num_pins > 0) return;  // and so are its ancestors
    unpinned_.remove(node);
    unpinned_.push_back(node);
  }
}

// The oldest unpinned node is a leaf: its descendants would be before it, and a pinned one would pin it.
void SlotTree::evict() noexcept {
  while (num_tokens_ > max_capacity_ && unpinned_.front()) {
    SlotNode* leaf = unpinned_.front();
    const int64_t num_left = leaf->tokens.size() - (num_tokens_ - max_capacity_);
    if (num_left <= 0) {
      evict_leaf(leaf);
    } else {
      leaf->tokens.truncate(num_left);
      num_tokens_ = max_capacity_;
    }
  }
}

// Its slots hold the path to its parent still; below the root that is nothing.
void SlotTree::evict_leaf(SlotNode* leaf) noexcept {
  SlotNode* parent = leaf->parent;
  while (SlotHolder* holder = leaf->holders.front()) {
    leaf->holders.remove(holder);
    if (parent->is_root()) {
      --root_.num_holders;
      holders_.erase(holders_.find(holder->slot));
    } else {
      parent->holders.push_front(holder);
      holder->node = parent;
    }
  }
  erase_leaf(leaf);
}

}  // namespace kvpage
