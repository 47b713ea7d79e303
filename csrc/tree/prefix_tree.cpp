#include "tree/prefix_tree.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "base/check.h"
#include "pool/eviction/eviction_policies.h"

namespace kvpage {
namespace {

// There are fewer than 2**31 blocks: no product of a number of blocks with this one overflows 64 bits.
constexpr int64_t kMaxBlockSize = std::numeric_limits<int32_t>::max();

uint64_t random_seed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

// Drops the blocks that are not kNoBlock.
void drop_blocks(BlockPool& pool, std::span<const int32_t> ids) noexcept {
  for (size_t i = ids.size(); i-- > 0;)
    if (ids[i] != kNoBlock) pool.drop(ids.subspan(i, 1));
}

int32_t count_blocks(std::span<const int32_t> ids) {
  return static_cast<int32_t>(std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id != kNoBlock; }));
}

}  // namespace

PrefixTree::PrefixTree(std::shared_ptr<BlockPool> pool, int64_t block_size, std::shared_ptr<BlockPool> host_pool,
                       uint64_t hash_mask, std::string_view eviction)
    : pool_(std::move(pool)),
      host_pool_(std::move(host_pool)),
      block_size_(block_size),
      eviction_(eviction),
      children_(block_size, random_seed(), hash_mask),
      siblings_(block_size),
      order_(make_eviction_policy(eviction, "eviction", EvictionCosts::by_depth(pool_->num_blocks(), block_size))) {
  check(block_size > 0, "block_size must be positive, got ", block_size);
  check(block_size <= kMaxBlockSize, "block_size must be at most ", kMaxBlockSize, ", got ", block_size);
  check(pool_ != host_pool_, "host_pool must not be the device's pool");
  if (host_pool_) pair_of_host_block_.assign(static_cast<size_t>(host_pool_->num_blocks()), kNoBlock);
}

PrefixTree::~PrefixTree() {
  arena_.for_each([&](const TreeNode& node) {
    pool_->drop(node.device_ids.span());
    if (host_pool_) drop_blocks(*host_pool_, node.host_ids.span());
  });
}

int64_t PrefixTree::num_cached() const {
  std::lock_guard lock(mutex_);
  return num_cached_;
}

int64_t PrefixTree::num_evictable() const {
  std::lock_guard lock(mutex_);
  return num_evictable_;
}

int64_t PrefixTree::num_host_cached() const {
  std::lock_guard lock(mutex_);
  return num_host_cached_;
}

int64_t PrefixTree::num_host_evictable() const {
  std::lock_guard lock(mutex_);
  return num_host_evictable_;
}

int64_t PrefixTree::num_nodes() const {
  std::lock_guard lock(mutex_);
  return children_.size();
}

int64_t PrefixTree::num_matches() const {
  std::lock_guard lock(mutex_);
  return num_matches_;
}

// All blocks on the host have come by a demotion, or were written out.
TreeCounts PrefixTree::counts() const {
  std::lock_guard lock(mutex_);
  TreeCounts counts = counts_;
  counts.num_host_evicted = counts.num_demoted + counts.num_written - num_host_cached_;
  return counts;
}

// --- matches ---

Match PrefixTree::match(const TokenView& tokens, std::string_view name, int priority, int64_t num_left_over,
                        bool is_hit) {
  std::lock_guard lock(mutex_);
  check_priority(priority);
  check_left_over(num_left_over);
  const int64_t limit = std::max<int64_t>(tokens.size() - num_left_over, 0) / block_size_;
  TreeNode* root = find_root(name);
  const Place place = root ? walk(root, tokens, limit) : Place{nullptr, 0, 0};
  if (place.num_blocks < limit) tokens.check_fits(place.num_blocks * block_size_, block_size_);
  TreeNode* end = root ? end_node_at(place) : make_root(name);
  if (is_hit) count_hit_locked(end);
  return pinned(end, place.num_blocks, priority);
}

void PrefixTree::count_hit(const Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  count_hit_locked(match.end_);
}

void PrefixTree::count_hit_locked(TreeNode* end) noexcept {
  for (TreeNode* node = end; !node->is_root(); node = node->parent)
    node->num_hits += node->num_hits < std::numeric_limits<int32_t>::max();
}

std::optional<PartMatch> PrefixTree::match_part(const Match& match, const TokenView& tokens, int64_t num_left_over) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  check_left_over(num_left_over);
  const int64_t start = match.num_tokens(), most = std::max<int64_t>(tokens.size() - num_left_over, 0);
  const int64_t count = std::min(block_size_, most - start);
  const auto [child, num_tokens] = siblings_.longest_common(match.end_, tokens, start, count);
  if (!child || num_tokens == block_size_) return std::nullopt;
  const bool is_on_device = child->num_device_blocks() > 0;
  const int32_t id = is_on_device ? child->device_ids.data()[0] : child->host_ids.data()[0];
  return PartMatch{pinned(child, match.num_blocks_ + child->num_blocks, 0), num_tokens, id, is_on_device};
}

Match PrefixTree::pin(const Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  return pinned(match.end_, match.num_blocks_, match.priority_);
}

Match PrefixTree::take(Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  Match taken = match;
  match.end_ = nullptr;
  return taken;
}

void PrefixTree::release(Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  --num_matches_;
  unpin_path(std::exchange(match.end_, nullptr), nullptr);
}

bool PrefixTree::is_released(const Match& match) const {
  std::lock_guard lock(mutex_);
  return match.end_ == nullptr;
}

void PrefixTree::check_live(const Match& match, const char* name) const {
  check(match.tree_.get() == this, name, " must be of this tree, got one of another tree");
  check(match.end_ != nullptr, name, " must be pinned, got one that is released already");
}

void PrefixTree::check_priority(int priority) {
  check(priority >= 0 && priority < kNumPriorities, "priority must be between 0 and ", kNumPriorities - 1, ", got ",
        priority);
}

void PrefixTree::check_left_over(int64_t num_left_over) {
  check(num_left_over >= 0, "num_left_over must not be negative, got ", num_left_over);
}

void PrefixTree::copy_block_ids(const Match& match, int64_t start, std::span<int32_t> ids) const {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  check(match.end_->is_on_device(), "match must be on the device, promote or trim it first");
  int64_t end = match.num_blocks_;
  for (const TreeNode* node = match.end_; end > start; node = node->parent) {
    const auto edge = node->device_ids.span();
    const int64_t num_wanted = std::min<int64_t>(node->num_blocks, end - start);
    std::copy_n(edge.end() - num_wanted, num_wanted, ids.begin() + (end - num_wanted - start));
    end -= node->num_blocks;
  }
}

void PrefixTree::copy_path(const Match& match, int64_t start, std::span<int32_t> rows) const {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  copy_rows(match.end_, match.num_blocks_, start, rows);
}

// `num_blocks` counts up to the end of the node.
void PrefixTree::copy_rows(const TreeNode* end, int64_t num_blocks, int64_t start, std::span<int32_t> rows) {
  const auto num_wanted = static_cast<int64_t>(rows.size() / 3);
  int32_t *device_ids = rows.data(), *host_ids = device_ids + num_wanted, *companions = host_ids + num_wanted;
  for (const TreeNode* node = end; num_blocks > start; node = node->parent) {
    const int64_t first = num_blocks - node->num_blocks;
    for (int64_t block = std::max<int64_t>(start - first, 0); block < node->num_blocks; ++block) {
      const int64_t place = first + block - start;
      if (place >= num_wanted) break;
      device_ids[place] = block < node->num_device_blocks() ? node->device_ids.data()[block] : kNoBlock;
      host_ids[place] = node->has_host_block(block) ? node->host_ids.data()[block] : kNoBlock;
      companions[place] = block < node->companions.size() ? node->companions.data()[block] : kNoBlock;
    }
    num_blocks = first;
  }
}

Match PrefixTree::pinned(TreeNode* end, int64_t num_blocks, int priority) {
  Match match(shared_from_this(), end, num_blocks, priority);
  pin_path(end, nullptr, priority);
  ++num_matches_;
  return match;
}

void PrefixTree::list(TreeNode* node) noexcept {
  order_.push_newest(node);
  num_evictable_ += node->num_device_blocks();
  num_host_evictable_ += node->num_host_blocks;
}

void PrefixTree::unlist(TreeNode* node) noexcept {
  order_.remove(node);
  order_.reuse(node);
  num_evictable_ -= node->num_device_blocks();
  num_host_evictable_ -= node->num_host_blocks;
}

// A node's priority changes while it is pinned only, and so is never below that of a node beneath it.
void PrefixTree::pin_path(TreeNode* end, const TreeNode* stop, int priority) noexcept {
  for (TreeNode* node = end; node != stop; node = node->parent) {
    if (node->num_pins++ == 0 && !node->is_root()) unlist(node);
    if (node->priority < priority) node->priority = static_cast<int8_t>(priority);
  }
}

void PrefixTree::unpin_path(TreeNode* end, const TreeNode* stop) noexcept {
  order_.begin_use();
  for (TreeNode* node = end; node != stop;) {
    TreeNode* parent = node->parent;
    if (--node->num_pins == 0) {
      if (parent) {
        list(node);
      } else {
        drop_unused_root(node);
      }
    }
    node = parent;
  }
}

// Counts the pins down as releasing would, and up again.
int64_t PrefixTree::num_pinned_only_by(std::span<const Match* const> matches) {
  std::lock_guard lock(mutex_);
  for (const Match* match : matches) check_live(*match, "match");
  int64_t num_blocks = 0;
  for (const Match* match : matches)
    for (TreeNode* node = match->end_; !node->is_root(); node = node->parent)
      if (--node->num_pins == 0) num_blocks += node->num_device_blocks();
  for (const Match* match : matches)
    for (TreeNode* node = match->end_; !node->is_root(); node = node->parent) ++node->num_pins;
  return num_blocks;
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
  root->point = children_.root_point(name);
  return root.release();
}

// A namespace exists as long as something is cached in it or a match names it. A match without a hit leaves no root.
void PrefixTree::drop_unused_root(TreeNode* root) noexcept {
  if (root->num_pins > 0 || root->num_children > 0) return;
  roots_.erase(roots_.find(*root->namespace_));
  arena_.give_back(root);
}

PrefixTree::Place PrefixTree::walk(TreeNode* from, const TokenView& tokens, int64_t num_blocks) const {
  Place place{from, from->num_blocks, 0};
  while (place.num_blocks < num_blocks && place.in_edge == place.node->num_blocks) {
    const int64_t start = place.num_blocks * block_size_;
    TreeNode* child = children_.find(place.node, tokens, start);
    if (!child) break;
    const int64_t most = std::min<int64_t>(child->num_blocks, num_blocks - place.num_blocks);
    const int64_t common = tokens.common_prefix(start, child->tokens.data(), most * block_size_) / block_size_;
    place = {child, common, place.num_blocks + common};
  }
  return place;
}

TreeNode* PrefixTree::end_node_at(const Place& place) {
  return place.in_edge == place.node->num_blocks ? place.node : split(place.node, place.in_edge);
}

TreeNode* PrefixTree::split(TreeNode* node, int64_t num_upper_blocks) {
  const int64_t num_upper_tokens = num_upper_blocks * block_size_;
  const int64_t num_upper_device = std::min(num_upper_blocks, node->num_device_blocks());
  const int64_t num_upper_host = std::min(num_upper_blocks, node->host_ids.size());
  const int64_t num_upper_companions = std::min(num_upper_blocks, node->companions.size());
  auto made = arena_.make();
  children_.reserve_one();
  Int32Run tokens = node->tokens.copy_smaller_half(num_upper_tokens);
  Int32Run device_ids = node->device_ids.copy_smaller_half(num_upper_device);
  Int32Run host_ids = node->host_ids.copy_smaller_half(num_upper_host);
  Int32Run companions = node->companions.copy_smaller_half(num_upper_companions);
  // From here on nothing throws.
  TreeNode* upper = made.release();
  TreeNode* parent = node->parent;
  const bool had_host_blocks = node->num_host_blocks > 0;
  children_.erase(node);
  siblings_.erase(parent, node);
  upper->parent = parent;
  upper->point = ++last_point_;
  upper->hash = node->hash;
  upper->start = node->start;
  upper->num_pins = node->num_pins;
  upper->num_hits = node->num_hits;
  upper->priority = node->priority;
  upper->tokens = node->tokens.cut_front(num_upper_tokens, std::move(tokens));
  upper->device_ids = node->device_ids.cut_front(num_upper_device, std::move(device_ids));
  if (had_host_blocks) {
    upper->host_ids = node->host_ids.cut_front(num_upper_host, std::move(host_ids));
    upper->shorten_host_ids(upper->host_ids.size());
    upper->num_host_blocks = count_blocks(upper->host_ids.span());
    node->num_host_blocks -= upper->num_host_blocks;
  }
  if (num_upper_companions > 0)
    upper->companions = node->companions.cut_front(num_upper_companions, std::move(companions));
  upper->num_blocks = static_cast<int32_t>(num_upper_blocks);
  node->num_blocks -= static_cast<int32_t>(num_upper_blocks);
  children_.insert(upper);
  siblings_.insert(parent, upper);
  link_child(upper, node);
  order_.split(node, upper, had_host_blocks);
  return upper;
}

// Requires room in the table.
void PrefixTree::link_child(TreeNode* parent, TreeNode* child) noexcept {
  child->parent = parent;
  child->start = parent->start + parent->num_blocks;
  child->hash = children_.hash(parent->point, TokenView(child->tokens.data(), child->tokens.size()), 0);
  children_.insert(child);
  siblings_.insert(parent, child);
  ++parent->num_children;
}

}  // namespace kvpage
