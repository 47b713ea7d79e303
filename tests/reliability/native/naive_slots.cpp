#include "naive_slots.h"

#include <algorithm>

struct NaiveSlots::Facts {
  explicit Facts(size_t size) : is_held(size), is_pinned(size), ends(size), num_children(size), only_child(size, -1) {}

  std::vector<bool> is_held, is_pinned, ends;  // by a slot, or pin, that ends there or behind; what ends there itself
  std::vector<int> num_children, only_child;

  bool is_end(int record) const { return ends[record] || num_children[record] != 1; }
};

NaiveSlots::Facts NaiveSlots::facts() const {
  Facts found(tokens_.size());
  for (const auto& [slot, holder] : held) {
    found.ends[holder.record] = true;
    for (int record = holder.record; record >= 0; record = tokens_[record].parent) found.is_held[record] = true;
  }
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (!tokens_[i].is_live) continue;
    if (tokens_[i].num_pins > 0) {
      found.ends[i] = true;
      for (auto record = static_cast<int>(i); record >= 0; record = tokens_[record].parent)
        found.is_pinned[record] = true;
    }
    if (tokens_[i].parent < 0) continue;
    ++found.num_children[tokens_[i].parent];
    found.only_child[tokens_[i].parent] = static_cast<int>(i);
  }
  return found;
}

int64_t NaiveSlots::num_tokens() const {
  return std::count_if(tokens_.begin(), tokens_.end(), [](const NaiveToken& token) { return token.is_live; });
}

int64_t NaiveSlots::num_over() const { return std::max<int64_t>(num_tokens() - max_capacity_, 0); }

int NaiveSlots::child(int parent, int64_t token) const {
  for (size_t i = 0; i < tokens_.size(); ++i)
    if (tokens_[i].is_live && tokens_[i].parent == parent && tokens_[i].token == token) return static_cast<int>(i);
  return -1;
}

NaiveSlots::Path NaiveSlots::path_of(const Tokens& tokens) const {
  Path path;
  for (int64_t token : tokens) {
    const int next = child(path.empty() ? -1 : path.back(), token);
    if (next < 0) break;
    path.push_back(next);
  }
  return path;
}

NaiveSlots::Path NaiveSlots::path_to(int record) const {
  Path path;
  for (; record >= 0; record = tokens_[record].parent) path.push_back(record);
  std::reverse(path.begin(), path.end());
  return path;
}

NaiveSlots::Path NaiveSlots::edge_to(int record, const Facts& facts) const {
  Path edge = {record};
  for (int above = tokens_[record].parent; above >= 0 && !facts.is_end(above); above = tokens_[above].parent)
    edge.push_back(above);
  std::reverse(edge.begin(), edge.end());
  return edge;
}

// From the edge that has the record up.
std::vector<NaiveSlots::Path> NaiveSlots::edges_on(int record, const Facts& facts) const {
  std::vector<Path> edges;
  while (record >= 0 && !facts.is_end(record)) record = facts.only_child[record];
  while (record >= 0) {
    edges.push_back(edge_to(record, facts));
    record = tokens_[edges.back().front()].parent;
  }
  return edges;
}

void NaiveSlots::use(const std::vector<Path>& edges) {
  const Facts found = facts();
  for (const Path& edge : edges) {
    if (found.is_pinned[edge.back()]) continue;
    ++clock_;
    for (int record : edge) tokens_[record].used = clock_;
  }
}

// What neither is held nor pinned goes; joined edges were used when their latest part was; then eviction.
void NaiveSlots::settle() {
  const Facts before = facts();
  for (size_t i = 0; i < tokens_.size(); ++i) tokens_[i].is_live &= before.is_held[i] || before.is_pinned[i];
  const Facts joined = facts();
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (!tokens_[i].is_live || !joined.is_end(static_cast<int>(i))) continue;
    int64_t latest = 0;
    const Path edge = edge_to(static_cast<int>(i), joined);
    for (int record : edge) latest = std::max(latest, tokens_[record].used);
    for (int record : edge) tokens_[record].used = latest;
  }
  while (num_over() > 0) {
    const Facts found = facts();
    int oldest = -1;
    for (size_t i = 0; i < tokens_.size(); ++i)
      if (tokens_[i].is_live && found.num_children[i] == 0 && !found.is_pinned[i] &&
          (oldest < 0 || tokens_[i].used < tokens_[oldest].used))
        oldest = static_cast<int>(i);
    if (oldest < 0) break;
    shorten(edge_to(oldest, found));
  }
}

void NaiveSlots::shorten(const Path& edge) {
  const size_t num_gone = std::min(edge.size(), static_cast<size_t>(num_over()));
  const Path gone(edge.end() - static_cast<int64_t>(num_gone), edge.end());
  const int left = tokens_[gone.front()].parent;
  for (int record : gone) tokens_[record].is_live = false;
  for (auto holder = held.begin(); holder != held.end();) {
    const bool is_gone = std::find(gone.begin(), gone.end(), holder->second.record) != gone.end();
    if (is_gone) holder->second.record = left;
    holder = is_gone && left < 0 ? held.erase(holder) : std::next(holder);
  }
}

// --- what the tree offers ---

int64_t NaiveSlots::insert(const Tokens& tokens, int64_t slot, int64_t version) {
  int record = -1;
  for (int64_t token : tokens) {
    int next = child(record, token);
    if (next < 0) {
      const auto dead = std::find_if(tokens_.begin(), tokens_.end(), [](const NaiveToken& t) { return !t.is_live; });
      next = static_cast<int>(dead - tokens_.begin());
      if (dead == tokens_.end()) tokens_.emplace_back();
      tokens_[next] = {true, record, token, 0, 0};
    }
    record = next;
  }
  ++tokens_[record].num_pins;
  ++num_pins;
  held.insert_or_assign(slot, NaiveHolder{record, version});
  settle();
  return num_over();
}

bool NaiveSlots::is_held_by(int64_t slot, int64_t version, const Tokens& prefix) const {
  const auto found = held.find(slot);
  if (found == held.end() || found->second.version != version) return false;
  const Path path = path_to(found->second.record);
  return path.size() >= prefix.size() &&
         std::equal(prefix.begin(), prefix.end(), path.begin(),
                    [&](int64_t token, int record) { return tokens_[record].token == token; });
}

int64_t NaiveSlots::longest(const Tokens& tokens) const {
  const Facts found = facts();
  int64_t count = 0;
  for (int record : path_of(tokens)) {
    if (!found.is_held[record]) break;
    ++count;
  }
  return count;
}

int64_t NaiveSlots::find(const Tokens& tokens) {
  const int64_t count = longest(tokens);
  if (count > 0) use(edges_on(path_of(tokens)[static_cast<size_t>(count - 1)], facts()));
  return count;
}

int64_t NaiveSlots::pin(const Tokens& tokens) {
  const int64_t count = longest(tokens);
  if (count == 0) return 0;
  ++tokens_[path_of(tokens)[static_cast<size_t>(count - 1)]].num_pins;
  ++num_pins;
  return count;
}

bool NaiveSlots::can_release(const Tokens& tokens) const {
  const Path path = path_of(tokens);
  return tokens.empty() || (path.size() == tokens.size() && tokens_[path.back()].num_pins > 0);
}

void NaiveSlots::release(const Tokens& tokens) {
  if (tokens.empty()) return;
  const int end = path_of(tokens).back();
  const std::vector<Path> edges = edges_on(end, facts());
  --tokens_[end].num_pins;
  --num_pins;
  use(edges);
  settle();
}

bool NaiveSlots::withdraw(int64_t slot) {
  const bool is_found = held.erase(slot) > 0;
  settle();
  return is_found;
}
