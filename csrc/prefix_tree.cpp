#include "prefix_tree.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "check.h"

namespace kvpage {
namespace {

// There are fewer than 2**31 blocks: no product of a number of blocks with this one overflows 64 bits.
constexpr int64_t kMaxBlockSize = std::numeric_limits<int32_t>::max();

uint64_t random_seed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

PrefixTree::PrefixTree(std::shared_ptr<BlockPool> pool, int64_t block_size, uint64_t hash_mask)
    : pool_(std::move(pool)), block_size_(block_size), children_(block_size, random_seed(), hash_mask) {
  check(block_size > 0, "block_size must be positive, got ", block_size);
  check(block_size <= kMaxBlockSize, "block_size must be at most ", kMaxBlockSize, ", got ", block_size);
}

PrefixTree::~PrefixTree() {
  arena_.for_each([&](const TreeNode& node) { pool_->drop(node.device.block_ids.span()); });
}

int64_t PrefixTree::num_cached() const {
  std::lock_guard lock(mutex_);
  return num_cached_;
}

int64_t PrefixTree::num_evictable() const {
  std::lock_guard lock(mutex_);
  return num_evictable_;
}

int64_t PrefixTree::num_nodes() const {
  std::lock_guard lock(mutex_);
  return children_.size();
}

int64_t PrefixTree::num_matches() const {
  std::lock_guard lock(mutex_);
  return num_matches_;
}

// --- matches ---

Match PrefixTree::match(const TokenView& tokens, std::string_view name) {
  std::lock_guard lock(mutex_);
  const int64_t limit = tokens.size() > 0 ? (tokens.size() - 1) / block_size_ : 0;
  TreeNode* root = find_root(name);
  const Place place = root ? walk(root, tokens, limit) : Place{nullptr, 0, 0};
  if (place.num_blocks < limit) tokens.check_fits(place.num_blocks * block_size_, block_size_);
  TreeNode* end = root ? end_node_at(place) : make_root(name);
  return pinned(end, place.num_blocks);
}

Match PrefixTree::pin(const Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  return pinned(match.end_, match.num_blocks_);
}

void PrefixTree::release(Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  unpin_path(std::exchange(match.end_, nullptr));
}

bool PrefixTree::is_released(const Match& match) const {
  std::lock_guard lock(mutex_);
  return match.end_ == nullptr;
}

void PrefixTree::check_live(const Match& match, const char* name) const {
  check(match.tree_.get() == this, name, " must be of this tree, got one of another tree");
  check(match.end_ != nullptr, name, " must be pinned, got one that is released already");
}

void PrefixTree::copy_block_ids(const Match& match, int64_t start, std::span<int32_t> ids) const {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  int64_t end = match.num_blocks_;
  for (const TreeNode* node = match.end_; end > start; node = node->parent) {
    const auto edge = node->device.block_ids.span();
    const int64_t num_wanted = std::min<int64_t>(node->num_blocks(), end - start);
    std::copy_n(edge.end() - num_wanted, num_wanted, ids.begin() + (end - num_wanted - start));
    end -= node->num_blocks();
  }
}

Match PrefixTree::pinned(TreeNode* end, int64_t num_blocks) {
  Match match(shared_from_this(), end, num_blocks);
  pin_path(end, nullptr);
  ++num_matches_;
  return match;
}

void PrefixTree::pin_path(TreeNode* end, const TreeNode* stop) noexcept {
  for (TreeNode* node = end; node != stop; node = node->parent) {
    if (node->num_pins++ > 0 || node->is_root()) continue;
    unpinned_.remove(node);
    num_evictable_ -= node->num_blocks();
  }
}

void PrefixTree::unpin_path(TreeNode* end) noexcept {
  --num_matches_;
  for (TreeNode* node = end; node;) {
    TreeNode* parent = node->parent;
    if (--node->num_pins == 0) {
      if (parent) {
        unpinned_.push_newest(node);
        num_evictable_ += node->num_blocks();
      } else {
        drop_unused_root(node);
      }
    }
    node = parent;
  }
}

// --- the structure ---

TreeNode* PrefixTree::find_root(std::string_view name) const {
  const auto found = roots_.find(name);
  return found == roots_.end() ? nullptr : found->second;
}

TreeNode* PrefixTree::make_root(std::string_view name) {
  auto root = arena_.make();
  const auto entry = roots_.emplace(name, root.get()).first;
  root->namespace_ = &entry->first;
  return root.release();
}

// A namespace exists as long as something is cached in it or a match names it; asking for one leaves nothing behind.
void PrefixTree::drop_unused_root(TreeNode* root) noexcept {
  if (root->num_pins > 0 || root->num_children > 0) return;
  roots_.erase(roots_.find(*root->namespace_));
  arena_.give_back(root);
}

PrefixTree::Place PrefixTree::walk(TreeNode* from, const TokenView& tokens, int64_t num_blocks) const {
  Place place{from, from->num_blocks(), 0};
  while (place.num_blocks < num_blocks && place.in_edge == place.node->num_blocks()) {
    const int64_t start = place.num_blocks * block_size_;
    TreeNode* child = children_.find(place.node, tokens, start);
    if (!child) break;
    const int64_t most = std::min(child->num_blocks(), num_blocks - place.num_blocks);
    const int64_t common = tokens.common_prefix(start, child->tokens.data(), most * block_size_) / block_size_;
    place = {child, common, place.num_blocks + common};
  }
  return place;
}

TreeNode* PrefixTree::end_node_at(const Place& place) {
  return place.in_edge == place.node->num_blocks() ? place.node : split(place.node, place.in_edge);
}

TreeNode* PrefixTree::split(TreeNode* node, int64_t num_upper_blocks) {
  const int64_t num_upper_tokens = num_upper_blocks * block_size_;
  auto made = arena_.make();
  children_.reserve_one();
  Int32Run tokens = node->tokens.copy_smaller_half(num_upper_tokens);
  Int32Run block_ids = node->device.block_ids.copy_smaller_half(num_upper_blocks);
  // From here on nothing throws.
  TreeNode* upper = made.release();
  children_.erase(node);
  upper->parent = node->parent;
  upper->hash = node->hash;
  upper->num_pins = node->num_pins;
  upper->tokens = node->tokens.cut_front(num_upper_tokens, std::move(tokens));
  upper->device.block_ids = node->device.block_ids.cut_front(num_upper_blocks, std::move(block_ids));
  children_.insert(upper);
  link_child(upper, node);
  if (node->num_pins == 0) unpinned_.insert_after(node, upper);
  return upper;
}

// Requires room in the table.
void PrefixTree::link_child(TreeNode* parent, TreeNode* child) noexcept {
  child->parent = parent;
  child->hash = children_.hash(parent, TokenView(child->tokens.data(), child->tokens.size()), 0);
  children_.insert(child);
  ++parent->num_children;
}

// --- insertion ---

Match PrefixTree::insert(const TokenView& tokens, std::span<const int32_t> block_ids, std::string_view name,
                         Match* after) {
  std::lock_guard lock(mutex_);
  const auto num_blocks = static_cast<int64_t>(block_ids.size());
  check(tokens.size() == num_blocks * block_size_, "tokens must fill the blocks: ", num_blocks, " blocks of ",
        block_size_, " need ", num_blocks * block_size_, " tokens, got ", tokens.size());
  tokens.check_fits(0, tokens.size());
  if (after) {
    check_live(*after, "after");
    check(name.empty(), "namespace must be left out with after, which has its own");
    return insert_below(*after, tokens, block_ids);
  }
  TreeNode* root = find_root(name);
  Match base = pinned(root ? root : make_root(name), 0);
  try {
    return insert_below(base, tokens, block_ids);
  } catch (...) {
    unpin_path(base.end_);
    throw;
  }
}

Match PrefixTree::insert_below(Match& base, const TokenView& tokens, std::span<const int32_t> block_ids) {
  const Place place = walk(base.end_, tokens, static_cast<int64_t>(block_ids.size()));
  TreeNode* end = end_node_at(place);
  const auto fresh = block_ids.subspan(static_cast<size_t>(place.num_blocks));
  const auto surplus = duplicates(base.end_, end, block_ids.first(static_cast<size_t>(place.num_blocks)));

  // A leaf that nobody else pins can grow; one that ends a second match must stay as long as that match.
  const bool grows = !end->is_root() && end->num_children == 0 && end->num_pins == (end == base.end_ ? 1 : 0);
  auto child = fresh.empty() || grows ? NodeArena::NodePtr(nullptr, {&arena_}) : arena_.make();
  if (child) children_.reserve_one();
  TreeNode* target = child ? child.get() : end;
  adopt(target, fresh, surplus);
  // From here on nothing throws.
  pin_path(end, base.end_);
  append_edge(target, tokens, fresh);
  if (child) {
    child->num_pins = 1;
    link_child(end, child.release());
  }
  base.end_ = nullptr;
  return Match(base.tree_, target, base.num_blocks_ + static_cast<int64_t>(block_ids.size()));
}

// The ids that differ from those cached on the path between the two nodes, in order.
std::vector<int32_t> PrefixTree::duplicates(const TreeNode* from, const TreeNode* end,
                                            std::span<const int32_t> block_ids) const {
  std::vector<int32_t> surplus;
  size_t stop = block_ids.size();
  for (const TreeNode* node = end; node != from; node = node->parent) {
    const auto cached = node->device.block_ids.span();
    const auto named = block_ids.subspan(stop - cached.size(), cached.size());
    stop -= cached.size();
    if (std::equal(cached.begin(), cached.end(), named.begin())) continue;
    for (size_t i = cached.size(); i-- > 0;)
      if (named[i] != cached[i]) surplus.push_back(named[i]);
  }
  std::reverse(surplus.begin(), surplus.end());
  return surplus;
}

// Room at the target first, then the blocks, so that nothing is left to fail.
void PrefixTree::adopt(TreeNode* target, std::span<const int32_t> fresh, std::span<const int32_t> surplus) {
  try {
    const auto num_fresh = static_cast<int64_t>(fresh.size());
    target->tokens.reserve(num_fresh * block_size_);
    target->device.block_ids.reserve(num_fresh);
    pool_->adopt(fresh, surplus);
  } catch (...) {
    target->tokens.truncate(target->tokens.size());  // gives the room back
    target->device.block_ids.truncate(target->num_blocks());
    throw;
  }
}

void PrefixTree::append_edge(TreeNode* node, const TokenView& tokens, std::span<const int32_t> fresh) noexcept {
  const auto num_fresh = static_cast<int64_t>(fresh.size());
  const int64_t num_tokens = num_fresh * block_size_;
  tokens.copy_to(tokens.size() - num_tokens, num_tokens, node->tokens.extend(num_tokens));
  std::copy(fresh.begin(), fresh.end(), node->device.block_ids.extend(num_fresh));
  num_cached_ += num_fresh;
}

// --- eviction ---

int64_t PrefixTree::evict(int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  return evict_locked(num_blocks);
}

int64_t PrefixTree::clear() {
  std::lock_guard lock(mutex_);
  return evict_locked(num_evictable_);
}

// Victims are strewn over memory. What the next eviction will touch is fetched ahead, and the node after it, through
// which the same will be done then: among 50,000 leaves an eviction costs two thirds. Always inlined, since the
// compiler drops a call of a function that does nothing but prefetch.
[[gnu::always_inline]] inline void PrefixTree::prefetch_victims() const noexcept {
  const TreeNode* next = unpinned_.oldest();
  if (!next) return;
  __builtin_prefetch(next->tokens.data());
  __builtin_prefetch(next->device.block_ids.data());
  children_.prefetch(next->hash);
  if (const TreeNode* second = unpinned_.newer(next)) {
    __builtin_prefetch(second);
    __builtin_prefetch(reinterpret_cast<const char*>(second) + 64);
  }
}

// The oldest unpinned node is a leaf: its descendants would stand before it, and a pinned one would pin it.
int64_t PrefixTree::evict_locked(int64_t num_blocks) noexcept {
  int64_t num_left = num_blocks;
  while (num_left > 0 && unpinned_.oldest()) {
    TreeNode* node = unpinned_.oldest();
    const int64_t num_evicted = std::min(num_left, node->num_blocks());
    truncate(node, node->num_blocks() - num_evicted);
    if (node->num_blocks() == 0) remove_leaf(node);
    num_left -= num_evicted;
  }
  prefetch_victims();
  return num_blocks - num_left;
}

void PrefixTree::truncate(TreeNode* node, int64_t num_blocks) noexcept {
  const auto evicted = node->device.block_ids.span().subspan(static_cast<size_t>(num_blocks));
  pool_->drop(evicted);
  num_cached_ -= static_cast<int64_t>(evicted.size());
  num_evictable_ -= static_cast<int64_t>(evicted.size());
  node->tokens.truncate(num_blocks * block_size_);
  node->device.block_ids.truncate(num_blocks);
}

void PrefixTree::remove_leaf(TreeNode* node) noexcept {
  TreeNode* parent = node->parent;
  children_.erase(node);
  unpinned_.remove(node);
  arena_.give_back(node);
  --parent->num_children;
  if (parent->is_root()) drop_unused_root(parent);
}

}  // namespace kvpage
