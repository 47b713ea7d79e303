#include "pool/block_pool.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/check.h"

namespace kvpage {

BlockPool::BlockPool(int64_t num_blocks) : num_free_(num_blocks) {
  check(num_blocks >= 0 && num_blocks <= std::numeric_limits<int32_t>::max(),
        "num_blocks must be between 0 and 2**31 - 1, got ", num_blocks);
  counts_.resize(static_cast<size_t>(num_blocks));
  free_.resize(static_cast<size_t>(num_blocks));
  for (int64_t i = 0; i < num_blocks; ++i) free_[i] = static_cast<int32_t>(num_blocks - 1 - i);
}

int64_t BlockPool::num_free() const {
  std::lock_guard lock(mutex_);
  return num_free_;
}

void BlockPool::allocate(std::span<int32_t> ids) {
  std::lock_guard lock(mutex_);
  const auto needed = static_cast<int64_t>(ids.size());
  if (needed > num_free_) throw OutOfBlocks(ids.size(), static_cast<size_t>(num_free_));
  std::reverse_copy(free_.begin() + (num_free_ - needed), free_.begin() + num_free_, ids.begin());
  num_free_ -= needed;
  for (int32_t id : ids) counts_[id] = 1;
}

void BlockPool::check_id(int64_t block_id) const {
  check(block_id >= 0 && block_id < num_blocks(), "block id must be between 0 and num_blocks - 1 = ", num_blocks() - 1,
        ", got ", block_id);
}

uint32_t BlockPool::count_or_zero(int32_t block_id) const {
  return static_cast<uint32_t>(block_id) < counts_.size() ? counts_[block_id] : 0;
}

// `count` is the block's count before this step of the call; earlier steps are included.
void BlockPool::refuse(int32_t block_id, uint32_t count, const char* verb) const {
  check_id(block_id);
  if (count == 0) fail("cannot ", verb, " block ", block_id, ": no reference is left on it");
  if (count & kCached) fail("cannot ", verb, " block ", block_id, ": it belongs to a prefix tree");
  fail("cannot ", verb, " block ", block_id, ": it has ", count, " references");
}

void BlockPool::share(std::span<const int32_t> ids) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto id = static_cast<uint32_t>(ids[i]);  // a negative id is out of range, too
    if (id < counts_.size() && counts_[id] != 0 && counts_[id] < kCached - 1) [[likely]] {
      ++counts_[id];
      continue;
    }
    for (size_t done = 0; done < i; ++done) --counts_[ids[done]];
    refuse(ids[i], count_or_zero(ids[i]), "share");
  }
}

void BlockPool::release(std::span<const int32_t> ids) {
  std::lock_guard lock(mutex_);
  release_locked(ids);
}

void BlockPool::release_locked(std::span<const int32_t> ids) {
  const int64_t num_free_before = num_free_;
  for (size_t i = ids.size(); i-- > 0;) {
    const auto id = static_cast<uint32_t>(ids[i]);
    if (id < counts_.size() && counts_[id] != 0 && counts_[id] < kCached) [[likely]] {
      if (--counts_[id] > 0) continue;
      free_[num_free_++] = ids[i];
      continue;
    }
    const uint32_t count = count_or_zero(ids[i]);
    num_free_ = num_free_before;
    for (size_t done = i + 1; done < ids.size(); ++done) ++counts_[ids[done]];
    refuse(ids[i], count, "release");
  }
}

int64_t BlockPool::ref_count(int64_t block_id) const {
  check_id(block_id);
  std::lock_guard lock(mutex_);
  return counts_[block_id] & ~kCached;
}

void BlockPool::adopt(std::span<const int32_t> fresh, std::span<const int32_t> surplus) {
  std::lock_guard lock(mutex_);
  adopt_locked(fresh, surplus);
}

void BlockPool::check_adoptable(std::span<const int32_t> fresh, std::span<const int32_t> surplus) {
  std::lock_guard lock(mutex_);
  const int64_t num_free_before = num_free_;
  adopt_locked(fresh, surplus);
  num_free_ = num_free_before;
  for (int32_t id : surplus) ++counts_[id];
  for (int32_t id : fresh) counts_[id] = 1;
}

void BlockPool::adopt_locked(std::span<const int32_t> fresh, std::span<const int32_t> surplus) {
  size_t num_adopted = 0;
  try {
    for (int32_t id : fresh) {
      check_id(id);
      if (counts_[id] != 1) refuse(id, counts_[id], "cache");
      counts_[id] = 1 | kCached;  // so that the same id, named again, is refused
      ++num_adopted;
    }
    release_locked(surplus);
  } catch (...) {
    for (int32_t id : fresh.first(num_adopted)) counts_[id] = 1;
    throw;
  }
}

int64_t BlockPool::adopt_free(std::span<int32_t> ids) noexcept {
  std::lock_guard lock(mutex_);
  const int64_t count = std::min(static_cast<int64_t>(ids.size()), num_free_);
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = free_[--num_free_];
    counts_[ids[i]] = 1 | kCached;
  }
  return count;
}

void BlockPool::drop(std::span<const int32_t> ids) noexcept {
  std::lock_guard lock(mutex_);
  for (size_t i = ids.size(); i-- > 0;) {
    counts_[ids[i]] = 0;
    free_[num_free_++] = ids[i];
  }
}

bool BlockPool::all_cached(std::span<const int32_t> ids) const {
  std::lock_guard lock(mutex_);
  return std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return counts_[id] == (1 | kCached); });
}

void BlockPool::check_invariants() const {
  std::lock_guard lock(mutex_);
  std::vector<bool> is_free(counts_.size());
  for (int64_t i = 0; i < num_free_; ++i) {
    const int32_t id = free_[i];
    if (is_free[id]) throw std::runtime_error("block " + std::to_string(id) + " is free twice");
    if (counts_[id] != 0) throw std::runtime_error("block " + std::to_string(id) + " is free and has references");
    is_free[id] = true;
  }
  for (size_t id = 0; id < counts_.size(); ++id) {
    if (counts_[id] == 0 && !is_free[id]) throw std::runtime_error("block " + std::to_string(id) + " is lost");
    if ((counts_[id] & kCached) && counts_[id] != (1 | kCached))
      throw std::runtime_error("block " + std::to_string(id) + " is cached and shared");
  }
}

}  // namespace kvpage
