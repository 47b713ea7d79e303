// PrefixTree: blocks that leave the device, blocks that leave the host, and blocks that come back.
#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "base/check.h"
#include "tree/prefix_tree.h"

namespace kvpage {
// Pairs that one call makes, in order; those of host blocks that the same call gives away again are left out.
class PrefixTree::Demotions {
 public:
  explicit Demotions(std::vector<int32_t>& pair_of_host_block) : pair_of_host_block_(pair_of_host_block) {}
  Demotions(const Demotions&) = delete;
  Demotions& operator=(const Demotions&) = delete;
  ~Demotions() { forget_places(); }

  // False, and nothing changed, if there is no memory.
  bool add(int32_t device_id, int32_t host_id) noexcept try {
    pairs_.emplace_back(device_id, host_id);
    pair_of_host_block_[static_cast<size_t>(host_id)] = static_cast<int32_t>(pairs_.size() - 1);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  // The host block is taken from whom it was given to.
  void forget(int32_t host_id) noexcept {
    const int32_t pair = std::exchange(pair_of_host_block_[static_cast<size_t>(host_id)], kNoBlock);
    if (pair != kNoBlock) pairs_[static_cast<size_t>(pair)].first = kNoBlock;
  }

  // Ends it. The blocks given up for these pairs are gone already: nothing may fail any more.
  std::vector<TierPair> take() noexcept {
    forget_places();
    std::erase_if(pairs_, [](const TierPair& pair) { return pair.first == kNoBlock; });
    return std::move(pairs_);
  }

 private:
  void forget_places() noexcept {
    for (const TierPair& pair : pairs_) pair_of_host_block_[static_cast<size_t>(pair.second)] = kNoBlock;
  }

  std::vector<int32_t>& pair_of_host_block_;
  std::vector<TierPair> pairs_;
};

// --- promotion ---

int64_t PrefixTree::num_device_blocks(const Match& match) const {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  int64_t num_blocks = match.num_blocks_;
  for (const TreeNode* node = match.end_; !node->is_on_device(); node = node->parent)
    num_blocks -= node->num_blocks - node->num_device_blocks();
  return num_blocks;
}

std::vector<TierPair> PrefixTree::promote(const Match& match, std::span<const int32_t> block_ids) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  const std::vector<TreeNode*> path = host_only_path(match.end_);
  int64_t num_host_only = 0;
  for (const TreeNode* node : path) num_host_only += node->num_blocks - node->num_device_blocks();
  check(static_cast<int64_t>(block_ids.size()) <= num_host_only, "block_ids must be at most one for each of ",
        num_host_only, " blocks that are on the host only, got ", block_ids.size());
  std::vector<TierPair> pairs;
  pairs.reserve(block_ids.size());
  try {
    for (TreeNode* node : path) node->device_ids.reserve(node->num_blocks - node->num_device_blocks());
    pool_->adopt(block_ids, {});
  } catch (...) {
    for (TreeNode* node : path) node->device_ids.truncate(node->num_device_blocks());
    throw;
  }
  fill_device(path, block_ids, &pairs);
  counts_.num_promoted += static_cast<int64_t>(pairs.size());
  return pairs;
}

void PrefixTree::trim(Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  int64_t num_blocks = match.num_blocks_;
  for (const TreeNode* node = match.end_; !node->is_on_device(); node = node->parent)
    num_blocks -= node->num_blocks - node->num_device_blocks();
  shorten_locked(match, num_blocks);
}

void PrefixTree::shorten(Match& match, int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  check(num_blocks >= 0 && num_blocks <= match.num_blocks_, "num_blocks must be between 0 and the match's ",
        match.num_blocks_, ", got ", num_blocks);
  shorten_locked(match, num_blocks);
}

void PrefixTree::shorten_locked(Match& match, int64_t num_blocks) {
  TreeNode* end = match.end_;
  int64_t num_left = match.num_blocks_;
  for (; num_left > num_blocks && num_left - end->num_blocks >= num_blocks; end = end->parent)
    num_left -= end->num_blocks;
  if (num_left > num_blocks) end = split(end, end->num_blocks - (num_left - num_blocks));
  unpin_path(std::exchange(match.end_, end), end);
  match.num_blocks_ = num_blocks;
}

std::vector<TierPair> PrefixTree::write_out(const Match& match, int64_t min_hits) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  check(min_hits >= 0, "min_hits must not be negative, got ", min_hits);
  std::vector<TreeNode*> path;
  for (TreeNode* node = match.end_; !node->is_root(); node = node->parent) path.push_back(node);
  Demotions written(pair_of_host_block_);
  bool has_room = host_pool_ != nullptr;
  for (size_t i = path.size(); has_room && i-- > 0;) {
    if (path[i]->num_hits < min_hits) continue;
    for (int64_t block = 0; has_room && block < path[i]->num_device_blocks(); ++block)
      has_room = path[i]->has_host_block(block) || give_host_block(path[i], block, &written);
  }
  std::vector<TierPair> pairs = written.take();
  counts_.num_written += static_cast<int64_t>(pairs.size());
  return pairs;
}

// --- leaving the device ---

std::vector<TierPair> PrefixTree::send_out(const Match& match) {
  std::lock_guard lock(mutex_);
  check_live(match, "match");
  Demotions sent(pair_of_host_block_);
  int64_t num_sent = 0;
  int32_t num_below = 0;  // children on the path
  for (TreeNode* node = match.end_; host_pool_ && !node->is_root(); node = node->parent) {
    if (node->num_pins > 1 || node->num_children > num_below) break;
    num_sent += send_end_out(node, &sent);
    if (node->num_device_blocks() > 0) break;
    num_below = 1;
  }
  std::vector<TierPair> pairs = sent.take();
  counts_.num_evicted += num_sent;
  counts_.num_demoted += static_cast<int64_t>(pairs.size());
  return pairs;
}

// Takes the device blocks of a pinned node that have host blocks, or can be given some, from its end back; returns how
// many.
int64_t PrefixTree::send_end_out(TreeNode* node, Demotions* sent) noexcept {
  const int64_t end = node->num_device_blocks();
  int64_t block = end;
  while (block > 0 && (node->has_host_block(block - 1) || give_host_block(node, block - 1, sent))) --block;
  leave_device(node, end - block);
  return end - block;
}

int64_t PrefixTree::evict(int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  const int64_t num_freed = evict_locked(num_blocks, nullptr);
  counts_.num_evicted += num_freed;
  return num_freed;
}

std::pair<int64_t, std::vector<TierPair>> PrefixTree::demote(int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  Demotions demotions(pair_of_host_block_);
  const int64_t num_freed = evict_locked(num_blocks, host_pool_ ? &demotions : nullptr);
  std::vector<TierPair> pairs = demotions.take();
  counts_.num_evicted += num_freed;
  counts_.num_demoted += static_cast<int64_t>(pairs.size());
  return {num_freed, std::move(pairs)};
}

int64_t PrefixTree::clear() {
  std::lock_guard lock(mutex_);
  const int64_t num_freed = evict_locked(num_evictable_, nullptr);
  evict_host_locked(num_host_evictable_, nullptr);
  evicted_.clear();
  return num_freed;
}

// Victims are scattered over memory. The nodes that the next eviction will touch are fetched ahead, and the node after
// it, through which the same will be done then: among 50,000 leaves an eviction costs two thirds. Always inlined, since
// the compiler drops a call of a function that does nothing but prefetch.
[[gnu::always_inline]] inline void PrefixTree::prefetch_victims() const noexcept {
  if (order_.is_ranked()) return;  // there, the question costs more than it saves
  const TreeNode* next = order_.first_on_device();
  if (!next) return;
  __builtin_prefetch(next->tokens.data());
  __builtin_prefetch(next->device_ids.data());
  children_.prefetch(next->hash);
  if (const TreeNode* second = order_.newer(next)) {
    __builtin_prefetch(second);
    __builtin_prefetch(reinterpret_cast<const char*>(second) + 64);
  }
}

// The first unpinned node on the device has nothing below it on the device: its descendants would stand before it, and
// a pinned one would pin it.
int64_t PrefixTree::evict_locked(int64_t num_blocks, Demotions* demotions) noexcept {
  int64_t num_left = num_blocks;
  while (num_left > 0) {
    TreeNode* node = order_.first_on_device();
    if (!node) break;
    Demotions* copies = node->priority < 0 ? nullptr : demotions;  // what was put first takes no other block's place
    const int64_t num_wanted = std::min(num_left, node->num_device_blocks());
    if (node->num_host_blocks == 0 && node->num_children == 0 && !copies) {  // nothing of it will be left to keep
      evict_end(node, node->num_blocks - num_wanted);
      num_left -= num_wanted;
      continue;
    }
    const int64_t num_moved = move_to_host(node, num_wanted, copies);
    num_left -= num_moved;
    if (num_moved > 0) continue;
    forget_below(node);
    evict_end(node, node->num_device_blocks() - 1);
    --num_left;
  }
  prefetch_victims();
  return num_blocks - num_left;
}

// Takes up to that many of the node's last device blocks, as far as they have host blocks or are given some; returns
// how many. Making room on the host may shorten the node, but not to less than those blocks.
int64_t PrefixTree::move_to_host(TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept {
  const int64_t end = node->num_device_blocks();
  int64_t num_lacking = 0;
  for (int64_t block = end - num_blocks; block < end; ++block) num_lacking += !node->has_host_block(block);
  if (demotions && num_lacking > 0) make_room_before(node, num_lacking, demotions);
  int64_t block = end;
  for (; block > end - num_blocks; --block) {
    if (node->has_host_block(block - 1)) continue;
    // Evicting on the host may hit this very node, which must not have blocks then that count as being on both.
    if (!demotions || (block < end && host_pool_->num_free() == 0)) break;
    if (!give_host_block(node, block - 1, demotions)) break;
  }
  leave_device(node, end - block);
  return end - block;
}

// Evicts on the host until that many blocks are free there, but nothing of `node` or that would be evicted after it, so
// that blocks are evicted in the same order as if each were evicted when the one that needs its place comes.
void PrefixTree::make_room_before(const TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept {
  int64_t num_lacking = num_blocks - host_pool_->num_free();
  while (num_lacking > 0) {
    if (TreeNode* copied = newest_copy()) {
      if (copied == node) return;
      num_lacking -= drop_copies(copied, num_lacking, demotions);
      continue;
    }
    TreeNode* victim = order_.first_on_host();
    if (!victim || victim == node || !order_.before(victim, node)) return;
    num_lacking -= leave_host(victim, num_lacking, demotions);
  }
}

void PrefixTree::leave_device(TreeNode* node, int64_t num_blocks) noexcept {
  if (num_blocks == 0) return;
  const auto dropped = node->device_ids.span().last(static_cast<size_t>(num_blocks));
  pool_->drop(dropped);
  log_left(ChangeKind::kLeftDevice, node, dropped);
  num_cached_ -= num_blocks;
  node->device_ids.truncate(node->num_device_blocks() - num_blocks);
  if (node->num_pins > 0) {
    if (node->num_device_blocks() == 0) order_.fill(node);
    return;
  }
  num_evictable_ -= num_blocks;
  if (node->num_device_blocks() == 0) order_.leave_device(node);
}

// False if there is no room on the host, none that can be made, or no memory for the entry.
bool PrefixTree::give_host_block(TreeNode* node, int64_t block, Demotions* demotions) noexcept {
  int32_t id;
  if (host_pool_->adopt_free({&id, 1}) == 0 &&
      (evict_host_locked(1, demotions) == 0 || host_pool_->adopt_free({&id, 1}) == 0))
    return false;
  if (set_host_block(node, block, id, demotions)) return true;
  host_pool_->drop({&id, 1});
  return false;
}

bool PrefixTree::set_host_block(TreeNode* node, int64_t block, int32_t id, Demotions* demotions) noexcept {
  Int32Run& ids = node->host_ids;
  const int64_t lacking = std::max<int64_t>(block + 1 - ids.size(), 0);
  try {
    ids.reserve(lacking);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (!demotions->add(node->device_ids.data()[block], id)) {
    ids.truncate(ids.size());
    return false;
  }
  std::fill_n(ids.extend(lacking), lacking, kNoBlock);
  ids.set(block, id);
  if (log_) log_->add(ChangeKind::kWritten, id, node->device_ids.data()[block]);
  ++num_host_cached_;
  const bool is_first = node->num_host_blocks++ == 0;
  if (node->num_pins > 0) {
    order_.fill(node);
    return true;
  }
  ++num_host_evictable_;
  if (is_first) order_.enter_host(node);
  return true;
}

// --- leaving the host ---

int64_t PrefixTree::evict_host(int64_t num_blocks) {
  std::lock_guard lock(mutex_);
  check(num_blocks >= 0, "num_blocks must not be negative, got ", num_blocks);
  return evict_host_locked(num_blocks, nullptr);
}

// The unpinned node whose host block was used last, if that is a copy of one that is on the device; null if it is not.
TreeNode* PrefixTree::newest_copy() const noexcept {
  for (int list = 0; list < EvictionOrder::kNumLists; ++list) {
    TreeNode* node = order_.newest_on_host(list);
    for (int64_t block = 0; node && block < node->num_device_blocks(); ++block)
      if (node->has_host_block(block)) return node;
  }
  return nullptr;
}

// Frees up to that many host blocks of the node that are copies, the first ones, since these were used last.
int64_t PrefixTree::drop_copies(TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept {
  int64_t num_dropped = 0;
  for (int64_t block = 0; block < node->num_device_blocks() && num_dropped < num_blocks; ++block) {
    if (!node->has_host_block(block)) continue;
    const int32_t id = node->host_ids.data()[block];
    if (demotions) demotions->forget(id);
    host_pool_->drop({&id, 1});
    log_left(ChangeKind::kLeftHost, node, {&id, 1});
    node->host_ids.set(block, kNoBlock);
    ++num_dropped;
  }
  node->shorten_host_ids(node->host_ids.size());
  num_host_cached_ -= num_dropped;
  num_host_evictable_ -= num_dropped;
  node->num_host_blocks -= static_cast<int32_t>(num_dropped);
  if (node->num_host_blocks == 0) order_.leave_host(node);
  return num_dropped;
}

// The first unpinned node on the host has nothing below it that is on the host only.
int64_t PrefixTree::evict_host_locked(int64_t num_blocks, Demotions* demotions) noexcept {
  int64_t num_left = num_blocks;
  while (num_left > 0) {
    if (TreeNode* copied = newest_copy()) {
      num_left -= drop_copies(copied, num_left, demotions);
      continue;
    }
    TreeNode* node = order_.first_on_host();
    if (!node) break;
    num_left -= leave_host(node, num_left, demotions);
  }
  return num_blocks - num_left;
}

// Takes up to that many host blocks from the node's end, at least one; returns how many. What is on the host only is
// forgotten, and the node with its last block.
int64_t PrefixTree::leave_host(TreeNode* node, int64_t num_blocks, Demotions* demotions) noexcept {
  const int64_t size = node->host_ids.size(), num_host_only = node->num_blocks - node->num_device_blocks();
  const int64_t num_taken = num_host_only > 0 ? std::min(num_blocks, num_host_only) : 1;
  if (demotions)
    for (int32_t id : node->host_ids.span().last(static_cast<size_t>(num_taken))) demotions->forget(id);
  if (num_host_only > 0) {
    evict_end(node, node->num_blocks - num_taken);
  } else {
    drop_host(node, size - 1);
    node->shorten_host_ids(size - 1);
  }
  return num_taken;
}

// Frees the host blocks from the one at `begin` on; their entries stay.
void PrefixTree::drop_host(TreeNode* node, int64_t begin) noexcept {
  if (begin >= node->host_ids.size()) return;
  int64_t num_dropped = 0;
  const auto ids = node->host_ids.span().subspan(static_cast<size_t>(begin));
  for (size_t end = ids.size(); end > 0;) {  // run by run, the last first
    size_t first = end;
    while (first > 0 && ids[first - 1] != kNoBlock) --first;
    host_pool_->drop(ids.subspan(first, end - first));
    log_left(ChangeKind::kLeftHost, node, ids.subspan(first, end - first));
    num_dropped += static_cast<int64_t>(end - first);
    end = first;
    while (end > 0 && ids[end - 1] == kNoBlock) --end;
  }
  num_host_cached_ -= num_dropped;
  num_host_evictable_ -= num_dropped;
  node->num_host_blocks -= static_cast<int32_t>(num_dropped);
  if (num_dropped > 0 && node->num_host_blocks == 0) order_.leave_host(node);
}

}  // namespace kvpage
