#include "tree/nodes/child_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvpage {

ChildTable::ChildTable(int64_t block_size, uint64_t seed, uint64_t hash_mask)
    : block_size_(block_size), seed_(seed), hash_mask_(hash_mask), entries_(16) {}

// Four bytes a step, as if they were a token, and the size at last.
uint64_t ChildTable::root_point(std::string_view name) const {
  const auto add = [](uint64_t point, int32_t word) { return TokenView(&word, 1).hash(0, 1, point); };
  uint64_t point = seed_;
  for (size_t i = 0; i < name.size(); i += sizeof(int32_t)) {
    int32_t word = 0;
    std::memcpy(&word, name.data() + i, std::min(name.size() - i, sizeof(word)));
    point = add(point, word);
  }
  return add(point, static_cast<int32_t>(name.size()));
}

TreeNode* ChildTable::find(const TreeNode* parent, const TokenView& tokens, int64_t start) const {
  const uint64_t wanted = hash(parent->point, tokens, start);
  for (size_t slot = home(wanted); entries_[slot].node; slot = next(slot)) {
    const Entry& entry = entries_[slot];
    if (entry.hash == wanted && entry.node->parent == parent &&
        tokens.common_prefix(start, entry.node->tokens.data(), block_size_) == block_size_) {
      return entry.node;
    }
  }
  return nullptr;
}

void ChildTable::reserve_one() {
  if (3 * static_cast<size_t>(size_ + 1) <= 2 * entries_.size()) return;
  std::vector<Entry> old(2 * entries_.size());
  old.swap(entries_);
  size_ = 0;
  for (const Entry& entry : old)
    if (entry.node) insert(entry.node);
}

void ChildTable::insert(TreeNode* node) noexcept {
  size_t slot = home(node->hash);
  while (entries_[slot].node) slot = next(slot);
  entries_[slot] = {node->hash, node};
  ++size_;
}

void ChildTable::erase(const TreeNode* node) noexcept {
  size_t hole = home(node->hash);
  while (entries_[hole].node != node) hole = next(hole);
  // An entry further on may fill the hole unless its home is after the hole, cyclically.
  for (size_t slot = next(hole); entries_[slot].node; slot = next(slot)) {
    const size_t mask = entries_.size() - 1;
    if (((slot - home(entries_[slot].hash)) & mask) < ((slot - hole) & mask)) continue;
    entries_[hole] = entries_[slot];
    hole = slot;
  }
  entries_[hole] = Entry();
  --size_;
}

}  // namespace kvpage
