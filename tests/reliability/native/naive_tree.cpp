#include "naive_tree.h"

#include <algorithm>
#include <limits>

namespace {

uint64_t mix(uint64_t seed, int64_t value) {
  const uint64_t z = (seed * 0xbf58476d1ce4e5b9ull + static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15ull;
  return z ^ (z >> 29);
}

bool fits(int64_t token) { return token == static_cast<int32_t>(token); }

}  // namespace

int NaiveTree::child(int parent, const Tokens& tokens, int64_t start) const {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const NaiveBlock& block = blocks[i];
    if (block.is_live && block.parent == parent &&
        std::equal(block.tokens.begin(), block.tokens.end(), tokens.begin() + start))
      return static_cast<int>(i);
  }
  return kNone;
}

int NaiveTree::add(int parent, const Tokens& tokens, int64_t start, int32_t device) {
  const auto dead = std::find_if(blocks.begin(), blocks.end(), [](const NaiveBlock& block) { return !block.is_live; });
  const auto record = static_cast<int>(dead - blocks.begin());
  if (dead == blocks.end()) blocks.emplace_back();
  NaiveBlock& block = blocks[record];
  block = NaiveBlock();
  block.is_live = true;
  block.parent = parent;
  block.depth = parent < 0 ? 0 : blocks[parent].depth + 1;
  block.tokens.assign(tokens.begin() + start, tokens.begin() + start + block_size_);
  block.content = parent < 0 ? static_cast<uint64_t>(-parent) : blocks[parent].content;
  for (int64_t token : block.tokens) block.content = mix(block.content, token);
  block.device = device;
  return record;
}

std::vector<int> NaiveTree::path_of(int name, const Tokens& tokens, int64_t most_blocks) const {
  std::vector<int> path;
  for (int parent = root_of(name); static_cast<int64_t>(path.size()) < most_blocks;) {
    parent = child(parent, tokens, static_cast<int64_t>(path.size()) * block_size_);
    if (parent == kNone) break;
    path.push_back(parent);
  }
  return path;
}

int64_t NaiveTree::on_device(const std::vector<int>& path) const {
  return std::count_if(path.begin(), path.end(), [&](int record) { return blocks[record].device != kNone; });
}

Tokens NaiveTree::tokens_of(const NaiveMatch& match) const {
  Tokens tokens;
  for (int record : match.path) tokens.insert(tokens.end(), blocks[record].tokens.begin(), blocks[record].tokens.end());
  return tokens;
}

// --- matches ---

bool NaiveTree::can_match(int name, const Tokens& tokens, int priority) const {
  const int64_t most = tokens.empty() ? 0 : (static_cast<int64_t>(tokens.size()) - 1) / block_size_;
  const auto found = static_cast<int64_t>(path_of(name, tokens, most).size());
  const auto next = tokens.begin() + found * block_size_;
  return priority >= 0 && priority < 8 && (found == most || std::all_of(next, next + block_size_, fits));
}

NaiveMatch NaiveTree::match(int name, const Tokens& tokens, int priority) {
  const int64_t most = tokens.empty() ? 0 : (static_cast<int64_t>(tokens.size()) - 1) / block_size_;
  return pinned(name, path_of(name, tokens, most), priority);
}

NaiveMatch NaiveTree::pinned(int name, const std::vector<int>& path, int priority) {
  for (int record : path) {
    ++blocks[record].pins;
    blocks[record].priority = std::max(blocks[record].priority, priority);
  }
  return {name, path, priority, true};
}

void NaiveTree::unpin(const std::vector<int>& path, size_t begin) {
  for (size_t i = path.size(); i-- > begin;)
    if (--blocks[path[i]].pins == 0) blocks[path[i]].used = ++clock_;
}

void NaiveTree::release(NaiveMatch& match) {
  match.is_live = false;
  unpin(match.path, 0);
}

void NaiveTree::trim(NaiveMatch& match) {
  const auto num_left = static_cast<size_t>(on_device(match.path));
  unpin(match.path, num_left);
  match.path.resize(num_left);
}

int64_t NaiveTree::longest_part(const NaiveMatch& match, const Tokens& tokens) const {
  const int parent = match.path.empty() ? root_of(match.name) : match.path.back();
  const size_t start = match.path.size() * static_cast<size_t>(block_size_);
  int64_t longest = 0;
  for (const NaiveBlock& block : blocks) {
    if (!block.is_live || block.parent != parent) continue;
    int64_t common = 0;
    while (common < block_size_ && start + common + 1 < tokens.size() && block.tokens[common] == tokens[start + common])
      ++common;
    longest = std::max(longest, common);
  }
  return longest;
}

// As if the path through record `first`, `num_blocks` long, were matched and released.
void NaiveTree::touch(const NaiveMatch& match, int first, int64_t num_blocks) {
  std::vector<int> path = match.path;
  for (int record = first; record != kNone;) {
    path.push_back(record);
    if (static_cast<int64_t>(path.size()) == num_blocks) break;
    int next = kNone;
    for (size_t i = 0; i < blocks.size(); ++i)
      if (blocks[i].is_live && blocks[i].parent == record) next = static_cast<int>(i);
    record = next;
  }
  NaiveMatch found = pinned(match.name, path, 0);
  release(found);
}

// --- copies ---

bool NaiveTree::can_promote(const NaiveMatch& match, const Ids& ids) const {
  const int64_t num_host_only = static_cast<int64_t>(match.path.size()) - on_device(match.path);
  return static_cast<int64_t>(ids.size()) <= num_host_only && pool_->can_adopt(ids, {});
}

std::vector<NaivePair> NaiveTree::promote(const NaiveMatch& match, const Ids& ids) {
  pool_->adopt(ids, {});
  std::vector<NaivePair> pairs;
  for (int record : match.path) {
    NaiveBlock& block = blocks[record];
    if (block.device != kNone || pairs.size() == ids.size()) continue;
    block.device = ids[pairs.size()];
    pairs.emplace_back(block.host, block.device);
  }
  return pairs;
}

std::vector<NaivePair> NaiveTree::write_out(const NaiveMatch& match) {
  std::vector<NaivePair> pairs;
  for (int record : match.path) {
    if (blocks[record].host || blocks[record].device == kNone) continue;
    if (!find_host()) break;
    --num_free_host;
    blocks[record].host = ++num_given_;
    pairs.emplace_back(blocks[record].device, blocks[record].host);
  }
  return pairs;
}

// --- insertion ---

// The named ids by what becomes of them.
struct NaiveTree::Given {
  std::vector<int> present;  // records that are there
  Ids taken, surplus;
};

NaiveTree::Given NaiveTree::given(int name, const Tokens& tokens, const Ids& ids, const NaiveMatch* after) const {
  Given found;
  int parent = after ? (after->path.empty() ? root_of(after->name) : after->path.back()) : root_of(name);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (parent != kNone || i == 0) parent = child(parent, tokens, static_cast<int64_t>(i) * block_size_);
    if (parent != kNone) found.present.push_back(parent);
    const int32_t device = parent == kNone ? kNone : blocks[parent].device;
    if (device == kNone) found.taken.push_back(ids[i]);
    if (device != kNone && device != ids[i]) found.surplus.push_back(ids[i]);
    if (parent == kNone) {
      found.taken.insert(found.taken.end(), ids.begin() + static_cast<int64_t>(i) + 1, ids.end());
      break;
    }
  }
  return found;
}

bool NaiveTree::can_insert(int name, const Tokens& tokens, const Ids& ids, const NaiveMatch* after,
                           int priority) const {
  if (tokens.size() != ids.size() * static_cast<size_t>(block_size_)) return false;
  if (!std::all_of(tokens.begin(), tokens.end(), fits) || priority < 0 || priority >= 8) return false;
  if (after && (!after->is_live || name != 0 || priority != 0)) return false;
  if (after && on_device(after->path) < static_cast<int64_t>(after->path.size())) return false;
  const Given found = given(name, tokens, ids, after);
  return pool_->can_adopt(found.taken, found.surplus);
}

NaiveMatch NaiveTree::insert(int name, const Tokens& tokens, const Ids& ids, NaiveMatch* after, int priority) {
  const Given found = given(name, tokens, ids, after);
  pool_->adopt(found.taken, found.surplus);
  NaiveMatch made = after ? *after : NaiveMatch{name, {}, priority, true};
  made = pinned(made.name, made.path, made.priority);
  size_t num_taken = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int parent = made.path.empty() ? root_of(made.name) : made.path.back();
    const bool is_new = i >= found.present.size();
    const int record = is_new ? add(parent, tokens, static_cast<int64_t>(i) * block_size_, kNone) : found.present[i];
    if (blocks[record].device == kNone) blocks[record].device = found.taken[num_taken++];
    ++blocks[record].pins;
    blocks[record].priority = std::max(blocks[record].priority, made.priority);
    made.path.push_back(record);
  }
  if (after) {
    after->is_live = false;
    for (int record : after->path) --blocks[record].pins;  // none is the last
  }
  return made;
}

// --- eviction ---

template <typename Has>
int NaiveTree::oldest(const Has& has) const {
  int found = kNone;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const NaiveBlock& block = blocks[i];
    if (!block.is_live || block.pins > 0 || !has(block)) continue;
    const NaiveBlock* best = found == kNone ? nullptr : &blocks[found];
    if (!best || std::pair(block.priority, block.used) < std::pair(best->priority, best->used))
      found = static_cast<int>(i);
  }
  return found;
}

void NaiveTree::free_device(NaiveBlock& block) {
  pool_->drop(block.device);
  block.device = kNone;
}

void NaiveTree::forget(int record) {
  for (size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i].is_live && blocks[i].parent == record) forget(static_cast<int>(i));
  NaiveBlock& block = blocks[record];
  if (block.device != kNone) free_device(block);
  num_free_host += block.host != 0;
  block.is_live = false;
}

int NaiveTree::newest_copy() const {
  for (int priority = 0; priority < 8; ++priority) {
    const NaiveBlock* newest = nullptr;
    for (const NaiveBlock& block : blocks) {
      const bool is_of_class = block.is_live && block.pins == 0 && block.host != 0 && block.priority == priority;
      if (is_of_class && (!newest || block.used > newest->used)) newest = &block;
    }
    if (newest && newest->device != kNone) return static_cast<int>(newest - blocks.data());
  }
  return kNone;
}

bool NaiveTree::evict_host_one() {
  if (const int copied = newest_copy(); copied != kNone) {
    blocks[copied].host = 0;
    ++num_free_host;
    return true;
  }
  const int record = oldest([](const NaiveBlock& block) { return block.host != 0; });
  if (record == kNone) return false;
  if (blocks[record].device == kNone) {
    forget(record);
  } else {
    blocks[record].host = 0;
    ++num_free_host;
  }
  return true;
}

bool NaiveTree::find_host() { return num_free_host > 0 || evict_host_one(); }

int64_t NaiveTree::evict_host(int64_t num_blocks) {
  int64_t done = 0;
  while (done < num_blocks && evict_host_one()) ++done;
  return done;
}

int64_t NaiveTree::leave(int64_t num_blocks, bool may_copy, std::vector<NaivePair>* pairs) {
  int64_t done = 0;
  for (; done < num_blocks; ++done) {
    const int record = oldest([](const NaiveBlock& block) { return block.device != kNone; });
    if (record == kNone) break;
    NaiveBlock& block = blocks[record];
    if (!block.host && may_copy && find_host()) {
      --num_free_host;
      block.host = ++num_given_;
      pairs->emplace_back(block.device, block.host);
    }
    block.host ? free_device(block) : forget(record);
  }
  if (!pairs) return done;
  std::erase_if(*pairs, [&](const NaivePair& pair) {
    return std::none_of(blocks.begin(), blocks.end(),
                        [&](const NaiveBlock& block) { return block.is_live && block.host == pair.second; });
  });
  return done;
}

int64_t NaiveTree::drop(int name, const Tokens& tokens) {
  const std::vector<int> path = path_of(name, tokens, static_cast<int64_t>(tokens.size()) / block_size_);
  int64_t done = 0;
  for (size_t i = path.size(); i-- > 0; done += block_size_) {
    const bool goes_on = std::any_of(blocks.begin(), blocks.end(),
                                     [&](const NaiveBlock& block) { return block.is_live && block.parent == path[i]; });
    if (goes_on || blocks[path[i]].pins > 0) break;
    forget(path[i]);
  }
  return done;
}

int64_t NaiveTree::clear() {
  const int64_t freed = leave(std::numeric_limits<int64_t>::max(), false, nullptr);
  evict_host(std::numeric_limits<int64_t>::max());
  return freed;
}

int64_t NaiveTree::count(int32_t NaiveBlock::* tier, bool only_unpinned) const {
  return std::count_if(blocks.begin(), blocks.end(), [&](const NaiveBlock& block) {
    return block.is_live && block.*tier != kNone && (block.pins == 0 || !only_unpinned);
  });
}

int64_t NaiveTree::count_host(bool only_unpinned) const {
  return std::count_if(blocks.begin(), blocks.end(), [&](const NaiveBlock& block) {
    return block.is_live && block.host != 0 && (block.pins == 0 || !only_unpinned);
  });
}
