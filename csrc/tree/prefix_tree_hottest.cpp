// PrefixTree: its hottest edges, found among a bounded number of them.
//
//      walked     the edges near the roots, nearest first:  an edge was found at least as often as those below it
//      climbed    from the edges used last to their roots:  what is hot was used lately, or is above what was
//
// Both hold with each edge all that it goes on from, and name an edge after that. So do the hottest of both.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/check.h"
#include "tree/prefix_tree.h"

namespace kvpage {
namespace {

class Onlooker {
 public:
  // Looks at edges below the tops of treaps of children, level by level, until there are `limit`.
  void walk_down(std::vector<const TreeNode*> tops, int64_t limit) {
    for (size_t i = 0; i < tops.size() && static_cast<int64_t>(seen_.size()) < limit; ++i) {
      add(tops[i]);
      for (const TreeNode* next : {tops[i]->left, tops[i]->right, tops[i]->children})
        if (next) tops.push_back(next);
    }
  }

  // Looks at the edge and at those that it goes on from, if they are of the namespace. Returns how many these are.
  int64_t climb(const TreeNode* node, std::optional<std::string_view> name) {
    std::vector<const TreeNode*> path;
    for (; !node->is_root() && !is_seen_.contains(node); node = node->parent) path.push_back(node);
    const auto num_climbed = static_cast<int64_t>(path.size());
    if (!node->is_root() || !name || *node->namespace_ == *name)
      for (; !path.empty(); path.pop_back()) add(path.back());
    return num_climbed;
  }

  // The hottest, `limit` at most. Of those that were found as often, first those that were seen first.
  std::vector<const TreeNode*> hottest(int64_t limit) && {
    const auto is_hotter = [](const TreeNode* a, const TreeNode* b) { return a->num_hits > b->num_hits; };
    std::stable_sort(seen_.begin(), seen_.end(), is_hotter);
    if (static_cast<int64_t>(seen_.size()) > limit) seen_.resize(static_cast<size_t>(limit));
    return std::move(seen_);
  }

  int64_t num_seen() const { return static_cast<int64_t>(seen_.size()); }

 private:
  void add(const TreeNode* node) {
    if (is_seen_.insert(node).second) seen_.push_back(node);
  }

  std::vector<const TreeNode*> seen_;
  std::unordered_set<const TreeNode*> is_seen_;
};

HotPrefix described(const TreeNode* node, int64_t max_tokens) {
  HotPrefix found;
  found.num_tokens = node->tokens.size();
  found.num_hits = node->num_hits;
  found.num_pins = node->num_pins;
  found.num_blocks = node->num_device_blocks();
  found.num_host_blocks = node->num_host_blocks;
  const auto first = node->tokens.span().first(static_cast<size_t>(std::min(max_tokens, found.num_tokens)));
  found.first_tokens.assign(first.begin(), first.end());
  return found;
}

// Each with the index of the edge that it goes on from, which is among those before it.
std::vector<HotPrefix> described(const std::vector<const TreeNode*>& nodes, int64_t max_tokens) {
  std::vector<HotPrefix> found;
  std::unordered_map<const TreeNode*, size_t> places;
  for (const TreeNode* node : nodes) {
    HotPrefix prefix = described(node, max_tokens);
    if (node->parent->is_root()) {
      prefix.name = *node->parent->namespace_;
    } else {
      const size_t place = places.at(node->parent);
      const HotPrefix& before = found[place];
      prefix.name = before.name;
      prefix.parent = static_cast<int64_t>(place);
      prefix.start = before.start + before.num_tokens;
    }
    places.emplace(node, found.size());
    found.push_back(std::move(prefix));
  }
  return found;
}

}  // namespace

std::vector<HotPrefix> PrefixTree::hottest(int64_t limit, int64_t max_tokens,
                                           std::optional<std::string_view> name) const {
  check(limit >= 0, "limit must not be negative, got ", limit);
  check(max_tokens >= 0, "max_tokens must not be negative, got ", max_tokens);
  std::lock_guard lock(mutex_);
  Onlooker onlooker;
  onlooker.walk_down(tops(name), kMostSeen);
  int64_t num_left = onlooker.num_seen() < kMostSeen ? 0 : kMostSeen;
  for (int list = EvictionOrder::kNumLists; list-- > 0;)
    for (const TreeNode* node = order_.newest(list); node && num_left > 0; node = EvictionOrder::older(node))
      num_left -= 1 + onlooker.climb(node, name);
  return described(std::move(onlooker).hottest(limit), max_tokens);
}

// The tops of the treaps below the roots, kMostSeen of them at most.
std::vector<const TreeNode*> PrefixTree::tops(std::optional<std::string_view> name) const {
  std::vector<const TreeNode*> found;
  auto root = name ? roots_.find(*name) : roots_.begin();
  for (; root != roots_.end() && static_cast<int64_t>(found.size()) < kMostSeen; ++root) {
    if (root->second->children) found.push_back(root->second->children);
    if (name) break;
  }
  return found;
}

}  // namespace kvpage
