#include "tree/tree_log.h"

#include <new>
#include <utility>

namespace kvpage {

void TreeLog::lose() noexcept {
  is_lost_ = true;
  changes_ = TreeChanges();
}

void TreeLog::inserted(std::span<const int32_t> ids, int64_t before, const TokenView& tokens,
                       const std::string* name) noexcept {
  if (is_lost_ || ids.empty()) return;
  try {
    if (name) changes_.namespaces.push_back(*name);
    for (int32_t id : ids) {
      changes_.changes.push_back({ChangeKind::kInserted, id, before});
      before = id;
    }
    const auto size = changes_.tokens.size();
    changes_.tokens.resize(size + static_cast<size_t>(tokens.size()));
    tokens.copy_to(0, tokens.size(), changes_.tokens.data() + size);
  } catch (const std::bad_alloc&) {
    return lose();
  }
  lose_if_too_large();
}

void TreeLog::add(ChangeKind kind, int64_t id, int64_t value) noexcept {
  if (is_lost_) return;
  try {
    changes_.changes.push_back({kind, id, value});
  } catch (const std::bad_alloc&) {
    return lose();
  }
  lose_if_too_large();
}

void TreeLog::left(ChangeKind kind, std::span<const int32_t> ids, uint64_t used_at) noexcept {
  for (int32_t id : ids) add(kind, id, static_cast<int64_t>(used_at));
}

TreeChanges TreeLog::take() noexcept {
  is_lost_ = false;
  return std::exchange(changes_, TreeChanges());
}

void TreeLog::lose_if_too_large() noexcept {
  size_t num_bytes = changes_.changes.size() * sizeof(TreeChange) + changes_.tokens.size() * sizeof(int32_t);
  num_bytes += changes_.namespaces.size() * sizeof(std::string);
  if (num_bytes > static_cast<size_t>(max_bytes_)) lose();
}

}  // namespace kvpage
