#include "tree/prefix_tree.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "base/check.h"

namespace kvpage {
namespace {

// There are fewer than 2**31 blocks: no product of a number of blocks with this one overflows 64 bits.
constexpr int64_t kMaxBlockSize = std::numeric_limits<int32_t>::max();

uint64_t random_seed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

// Drops what is not kNoBlock.
void drop_blocks(BlockPool& pool, std::span<const int32_t> ids) noexcept {
  for (size_t i = ids.size(); i-- > 0;)
    if (ids[i] != kNoBlock) pool.drop(ids.subspan(i, 1));
}

int32_t count_blocks(std::span<const int32_t> ids) {
  return static_cast<int32_t>(std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id != kNoBlock; }));
}

}  // namespace

PrefixTree::PrefixTree(std::shared_ptr<BlockPool> pool, int64_t block_size, std::shared_ptr<BlockPool> host_pool,
                       uint64_t hash_mask)
    : pool_(std::move(pool)),
      host_pool_(std::move(host_pool)),
      block_size_(block_size),
      children_(block_size, random_seed(), hash_mask),
      siblings_(block_size) {
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

// --- matches ---

Match PrefixTree::match(const TokenView& tokens, std::string_view name, int priority, int64_t num_left_over) {
  std::lock_guard lock(mutex_);
  check_priority(priority);
  check_left_over(num_left_over);
  const int64_t limit = std::max<int64_t>(tokens.size() - num_left_over, 0) / block_size_;
  TreeNode* root = find_root(name);
  const Place place = root ? walk(root, tokens, limit) : Place{nullptr, 0, 0};
  if (place.num_blocks < limit) tokens.check_fits(place.num_blocks * block_size_, block_size_);
  TreeNode* end = root ? end_node_at(place) : make_root(name);
  if (host_pool_)
    for (TreeNode* node = end; !node->is_root(); node = node->parent)
      node->num_hits += node->num_hits < std::numeric_limits<int32_t>::max();
  return pinned(end, place.num_blocks, priority);
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
  num_evictable_ -= node->num_device_blocks();
  num_host_evictable_ -= node->num_host_blocks;
}

// A node's priority changes while it is pinned only, and so is never below that of a node beneath it.
void PrefixTree::pin_path(TreeNode* end, const TreeNode* stop, int priority) noexcept {
  for (TreeNode* node = end; node != stop; node = node->parent) {
    if (node->num_pins++ == 0 && !node->is_root()) unlist(node);
    if (node->priority < priority) node->priority = static_cast<uint8_t>(priority);
  }
}

void PrefixTree::unpin_path(TreeNode* end, const TreeNode* stop) noexcept {
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
  return root.release();
}

// A namespace exists as long as something is cached in it or a match names it; asking for one leaves nothing behind.
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
  auto made = arena_.make();
  children_.reserve_one();
  Int32Run tokens = node->tokens.copy_smaller_half(num_upper_tokens);
  Int32Run device_ids = node->device_ids.copy_smaller_half(num_upper_device);
  Int32Run host_ids = node->host_ids.copy_smaller_half(num_upper_host);
  // From here on nothing throws.
  TreeNode* upper = made.release();
  TreeNode* parent = node->parent;
  const bool had_host_blocks = node->num_host_blocks > 0;
  children_.erase(node);
  siblings_.erase(parent, node);
  upper->parent = parent;
  upper->hash = node->hash;
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
  upper->num_blocks = static_cast<int32_t>(num_upper_blocks);
  node->num_blocks -= static_cast<int32_t>(num_upper_blocks);
  children_.insert(upper);
  siblings_.insert(parent, upper);
  link_child(upper, node);
  if (node->num_pins == 0) order_.split(node, upper, had_host_blocks);
  return upper;
}

// Requires room in the table.
void PrefixTree::link_child(TreeNode* parent, TreeNode* child) noexcept {
  child->parent = parent;
  child->hash = children_.hash(parent, TokenView(child->tokens.data(), child->tokens.size()), 0);
  children_.insert(child);
  siblings_.insert(parent, child);
  ++parent->num_children;
}

// --- insertion ---

Match PrefixTree::insert(const TokenView& tokens, std::span<const int32_t> block_ids, std::string_view name,
                         Match* after, int priority) {
  std::lock_guard lock(mutex_);
  const auto num_blocks = static_cast<int64_t>(block_ids.size());
  check(tokens.size() == num_blocks * block_size_, "tokens must fill the blocks: ", num_blocks, " blocks of ",
        block_size_, " need ", num_blocks * block_size_, " tokens, got ", tokens.size());
  tokens.check_fits(0, tokens.size());
  check_priority(priority);
  if (after) {
    check_live(*after, "after");
    check(name.empty(), "namespace must be left out with after, which has its own");
    check(priority == 0, "priority must be left out with after, which has its own");
    check(after->end_->is_on_device(), "after must be on the device, promote or trim it first");
    return insert_below(*after, tokens, block_ids);
  }
  TreeNode* root = find_root(name);
  Match base = pinned(root ? root : make_root(name), 0, priority);
  try {
    return insert_below(base, tokens, block_ids);
  } catch (...) {
    --num_matches_;
    unpin_path(base.end_, nullptr);
    throw;
  }
}

// block_ids, by what stands at their tokens in the tree:
//
//      | on the device: surplus | host only: filled | nothing: fresh |
//                               | taken                              |
Match PrefixTree::insert_below(Match& base, const TokenView& tokens, std::span<const int32_t> block_ids) {
  const Place place = walk(base.end_, tokens, static_cast<int64_t>(block_ids.size()));
  const auto num_present = static_cast<size_t>(place.num_blocks);
  const auto num_filled = static_cast<size_t>(num_host_only(place));
  const auto taken = block_ids.subspan(num_present - num_filled);
  const auto fresh = block_ids.subspan(num_present);
  const auto surplus = duplicates(base.end_, place, block_ids.first(num_present));
  if (place.in_edge < place.node->num_blocks) pool_->check_adoptable(taken, surplus);  // a split is not undone
  TreeNode* end = end_node_at(place);
  const std::vector<TreeNode*> filled = host_only_path(end);

  // A leaf that nobody else pins can grow; one that ends a second match must stay as long as that match, and one of a
  // higher priority would hand it on.
  const bool grows = !end->is_root() && end->num_children == 0 && end->num_pins == (end == base.end_ ? 1 : 0) &&
                     end->priority <= base.priority_;
  auto child = fresh.empty() || grows ? NodeArena::NodePtr(nullptr, {&arena_}) : arena_.make();
  if (child) children_.reserve_one();
  TreeNode* target = child ? child.get() : end;
  adopt(target, fresh, surplus, filled, taken);
  // From here on nothing throws.
  pin_path(end, base.end_, base.priority_);
  fill_device(filled, taken.first(num_filled), nullptr);
  log_inserted(end, tokens, fresh);
  append_edge(target, tokens, fresh);
  if (child) {
    child->num_pins = 1;
    child->priority = static_cast<uint8_t>(base.priority_);
    link_child(end, child.release());
  }
  base.end_ = nullptr;
  return Match(base.tree_, target, base.num_blocks_ + static_cast<int64_t>(block_ids.size()), base.priority_);
}

// How many blocks of the path, at its end, are on the host alone.
int64_t PrefixTree::num_host_only(const Place& place) const {
  int64_t count = 0, in_edge = place.in_edge;
  for (const TreeNode* node = place.node; node->num_device_blocks() < in_edge;
       node = node->parent, in_edge = node->num_blocks)
    count += in_edge - node->num_device_blocks();
  return count;
}

// Of the ids up to the path's last block on the device: those that differ from what is cached there, in order.
std::vector<int32_t> PrefixTree::duplicates(const TreeNode* from, const Place& place,
                                            std::span<const int32_t> block_ids) const {
  std::vector<int32_t> surplus;
  auto stop = block_ids.size();
  int64_t in_edge = place.in_edge;
  for (const TreeNode* node = place.node; node != from; node = node->parent, in_edge = node->num_blocks) {
    const auto on_device = static_cast<size_t>(std::min(in_edge, node->num_device_blocks()));
    const auto cached = node->device_ids.span().first(on_device);
    stop -= static_cast<size_t>(in_edge);
    const auto named = block_ids.subspan(stop, cached.size());
    if (std::equal(cached.begin(), cached.end(), named.begin())) continue;
    for (size_t i = cached.size(); i-- > 0;)
      if (named[i] != cached[i]) surplus.push_back(named[i]);
  }
  std::reverse(surplus.begin(), surplus.end());
  return surplus;
}

// Room first, at the target and in the nodes that are filled; then the blocks, so that nothing is left to fail.
void PrefixTree::adopt(TreeNode* target, std::span<const int32_t> fresh, std::span<const int32_t> surplus,
                       std::span<TreeNode* const> filled, std::span<const int32_t> taken) {
  const auto num_fresh = static_cast<int64_t>(fresh.size());
  try {
    for (TreeNode* node : filled) node->device_ids.reserve(node->num_blocks - node->num_device_blocks());
    target->tokens.reserve(num_fresh * block_size_);
    target->device_ids.reserve(target->num_blocks - target->num_device_blocks() + num_fresh);
    pool_->adopt(taken, surplus);
  } catch (...) {  // gives the room back
    for (TreeNode* node : filled) node->device_ids.truncate(node->num_device_blocks());
    target->tokens.truncate(target->tokens.size());
    target->device_ids.truncate(target->num_device_blocks());
    throw;
  }
}

// From the first node that is not wholly on the device to the end, which is empty if there is none.
std::vector<TreeNode*> PrefixTree::host_only_path(TreeNode* end) {
  std::vector<TreeNode*> path;
  for (TreeNode* node = end; !node->is_on_device(); node = node->parent) path.push_back(node);
  std::reverse(path.begin(), path.end());
  return path;
}

// Requires room, and that the nodes are pinned.
void PrefixTree::fill_device(std::span<TreeNode* const> path, std::span<const int32_t> block_ids,
                             std::vector<TierPair>* pairs) noexcept {
  for (TreeNode* node : path) {
    const int64_t begin = node->num_device_blocks();
    const int64_t count = std::min<int64_t>(node->num_blocks - begin, static_cast<int64_t>(block_ids.size()));
    const auto ids = block_ids.first(static_cast<size_t>(count));
    std::copy(ids.begin(), ids.end(), node->device_ids.extend(count));
    const int32_t* host_ids = node->host_ids.data() + begin;
    for (int64_t i = 0; pairs && i < count; ++i) pairs->emplace_back(host_ids[i], ids[i]);
    for (int64_t i = 0; log_ && i < count; ++i) log_->add(ChangeKind::kPromoted, ids[i], host_ids[i]);
    block_ids = block_ids.subspan(ids.size());
    num_cached_ += count;
  }
}

void PrefixTree::append_edge(TreeNode* node, const TokenView& tokens, std::span<const int32_t> fresh) noexcept {
  const auto num_fresh = static_cast<int64_t>(fresh.size());
  const int64_t num_tokens = num_fresh * block_size_;
  tokens.copy_to(tokens.size() - num_tokens, num_tokens, node->tokens.extend(num_tokens));
  std::copy(fresh.begin(), fresh.end(), node->device_ids.extend(num_fresh));
  node->num_blocks += static_cast<int32_t>(num_fresh);
  num_cached_ += num_fresh;
}

}  // namespace kvpage
