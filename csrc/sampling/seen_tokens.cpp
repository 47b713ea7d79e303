#include "sampling/seen_tokens.h"

#include <algorithm>

namespace kvpage {

void SeenTokens::update(const int32_t* tokens, int64_t num_tokens) {
  if (num_tokens < num_seen_) {
    entries_.clear();
    std::fill(table_.begin(), table_.end(), -1);
    num_seen_ = 0;
  }
  for (; num_seen_ < num_tokens; ++num_seen_) entry_of(tokens[num_seen_]).count += num_seen_ >= num_prompt_tokens_;
}

SeenTokens::Entry& SeenTokens::entry_of(int32_t id) {
  if (2 * entries_.size() >= table_.size()) grow();
  const size_t place = place_of(id);
  if (table_[place] < 0) {
    entries_.push_back({id, 0});
    table_[place] = static_cast<int32_t>(entries_.size() - 1);
  }
  return entries_[static_cast<size_t>(table_[place])];
}

void SeenTokens::grow() {
  table_.assign(std::max<size_t>(2 * table_.size(), 64), -1);
  for (size_t i = 0; i < entries_.size(); ++i) table_[place_of(entries_[i].id)] = static_cast<int32_t>(i);
}

// Returns where an id is, or the free place where it would be.
size_t SeenTokens::place_of(int32_t id) const {
  const size_t mask = table_.size() - 1;
  size_t place = (static_cast<uint32_t>(id) * uint64_t{0x9E3779B97F4A7C15} >> 32) & mask;
  while (table_[place] >= 0 && entries_[static_cast<size_t>(table_[place])].id != id) place = (place + 1) & mask;
  return place;
}

}  // namespace kvpage
