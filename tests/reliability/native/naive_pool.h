// NaivePool: what BlockPool means, without counting anything twice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

using Ids = std::vector<int32_t>;

struct NaivePool {
  explicit NaivePool(int64_t num_blocks) : counts(static_cast<size_t>(num_blocks)), cached(counts.size()) {
    for (int64_t id = num_blocks; id-- > 0;) free.push_back(static_cast<int32_t>(id));
  }

  bool exists(int64_t id) const { return id >= 0 && id < static_cast<int64_t>(counts.size()); }

  // References that are not a tree's.
  int64_t num_owned(int64_t id) const { return exists(id) && !cached[id] ? counts[id] : 0; }

  bool can_share(const Ids& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return num_owned(id) > 0; });
  }
  bool can_release(const Ids& ids) const {
    return std::all_of(ids.begin(), ids.end(),
                       [&](int32_t id) { return num_owned(id) >= std::count(ids.begin(), ids.end(), id); });
  }
  bool can_adopt(const Ids& fresh, const Ids& surplus) const {
    const auto is_fresh = [&](int32_t id) { return std::count(fresh.begin(), fresh.end(), id); };
    return std::all_of(fresh.begin(), fresh.end(),
                       [&](int32_t id) { return num_owned(id) == 1 && is_fresh(id) == 1; }) &&
           std::none_of(surplus.begin(), surplus.end(), is_fresh) && can_release(surplus);
  }

  Ids allocate(int64_t count) {
    Ids ids;
    for (; count > 0; --count) {
      ids.push_back(free.back());
      free.pop_back();
      counts[ids.back()] = 1;
    }
    return ids;
  }
  void share(const Ids& ids) {
    for (int32_t id : ids) ++counts[id];
  }
  void release(const Ids& ids) {
    for (size_t i = ids.size(); i-- > 0;)
      if (--counts[ids[i]] == 0) free.push_back(ids[i]);
  }
  void adopt(const Ids& fresh, const Ids& surplus) {
    for (int32_t id : fresh) cached[id] = true;
    release(surplus);
  }
  void drop(int32_t id) {
    cached[id] = false;
    release({id});
  }

  std::vector<int64_t> counts;
  std::vector<bool> cached;
  Ids free;  // the next one to hand out stands last
};
