// PrefixTree: its entries, as an onlooker sees them.
#include "base/check.h"
#include "tree/prefix_tree.h"

namespace kvpage {
namespace {

TreeEntry entry_of(const TreeNode* node, const std::string& name, bool has_host_tier) {
  TreeEntry entry;
  entry.name = name;
  entry.num_pins = node->num_pins;
  entry.priority = node->priority;
  entry.used_at = static_cast<int64_t>(node->used_at);
  const auto tokens = node->tokens.span(), device_ids = node->device_ids.span(), host_ids = node->host_ids.span();
  entry.tokens.assign(tokens.begin(), tokens.end());
  entry.device_ids.assign(device_ids.begin(), device_ids.end());
  if (has_host_tier) {
    entry.host_ids.assign(host_ids.begin(), host_ids.end());
    entry.host_ids.resize(static_cast<size_t>(node->num_blocks), kNoBlock);
  }
  return entry;
}

// A node whose turn comes, below the entry at `parent`.
struct Waiting {
  const TreeNode* node;
  int64_t parent;
};

// The node and the siblings before it, the first of them last.
void wait_from(const TreeNode* top, int64_t parent, std::vector<Waiting>* waiting) {
  for (const TreeNode* node = top; node; node = node->left) waiting->push_back({node, parent});
}

}  // namespace

std::vector<TreeEntry> PrefixTree::entries(int64_t limit, std::optional<std::string_view> name) const {
  check(limit >= 0, "limit must not be negative, got ", limit);
  std::lock_guard lock(mutex_);
  std::vector<TreeEntry> found;
  for (const auto& [root_name, root] : roots_)
    if (!name || *name == root_name) add_entries(root, limit, &found);
  return found;
}

// Siblings follow one another by their tokens; the children of an entry come before the next sibling.
void PrefixTree::add_entries(const TreeNode* root, int64_t limit, std::vector<TreeEntry>* found) const {
  std::vector<Waiting> waiting;
  wait_from(root->children, -1, &waiting);
  while (!waiting.empty() && static_cast<int64_t>(found->size()) < limit) {
    const auto [node, parent] = waiting.back();
    waiting.pop_back();
    TreeEntry entry = entry_of(node, *root->namespace_, has_host_tier());
    entry.parent = parent;
    if (parent >= 0) {
      const TreeEntry& before = (*found)[static_cast<size_t>(parent)];
      entry.start = before.start + static_cast<int64_t>(before.tokens.size());
    }
    found->push_back(std::move(entry));
    wait_from(node->right, parent, &waiting);
    wait_from(node->children, static_cast<int64_t>(found->size()) - 1, &waiting);
  }
}

PathLook PrefixTree::look(const TokenView& tokens, std::string_view name) const {
  std::lock_guard lock(mutex_);
  PathLook look;
  const TreeNode* root = find_root(name);
  if (!root) {
    look.was_evicted = was_evicted(children_.root_point(name), tokens, 0);
    return look;
  }
  const Place place = walk(const_cast<TreeNode*>(root), tokens, tokens.size() / block_size_);
  look.ids.resize(3 * static_cast<size_t>(place.num_blocks));
  copy_rows(place.node, place.num_blocks - place.in_edge + place.node->num_blocks, 0, look.ids);
  look.num_common = place.num_blocks * block_size_;
  look_on(place, tokens, &look);
  return look;
}

bool PrefixTree::was_evicted(uint64_t point, const TokenView& tokens, int64_t start) const {
  return start + block_size_ <= tokens.size() && evicted_.has(children_.hash(point, tokens, start));
}

// Finds the tokens that the next block shares: of the same edge, or of a child. Where none shares a token, any child
// shows that the path goes on.
void PrefixTree::look_on(const Place& place, const TokenView& tokens, PathLook* look) const {
  const int64_t start = look->num_common, count = std::min(block_size_, tokens.size() - start);
  const int32_t* next = nullptr;
  int64_t num_common = 0;
  if (place.in_edge < place.node->num_blocks) {
    next = place.node->tokens.data() + place.in_edge * block_size_;
    num_common = tokens.common_prefix(start, next, count);
  } else {
    look->was_evicted = was_evicted(place.node->point, tokens, start);
    const auto [child, num_tokens] = siblings_.longest_common(place.node, tokens, start, count);
    const TreeNode* shown = child ? child : place.node->children;
    if (shown) next = shown->tokens.data();
    num_common = num_tokens;
  }
  look->num_common += num_common;
  if (next && num_common < block_size_) look->cached_token = next[num_common];
}

int64_t PrefixTree::num_held(const TokenView& tokens, std::string_view name) const {
  std::lock_guard lock(mutex_);
  const TreeNode* root = find_root(name);
  if (!root) return 0;
  const int64_t most = std::max<int64_t>(tokens.size() - 1, 0);
  const Place place = walk(const_cast<TreeNode*>(root), tokens, most / block_size_);
  const int64_t start = place.num_blocks * block_size_, count = std::min(block_size_, most - start);
  int64_t num_held = 0, in_edge = place.in_edge;
  if (in_edge < place.node->num_blocks) {
    const int32_t* next = place.node->tokens.data() + in_edge * block_size_;
    if (tokens.common_prefix(start, next, count) > 0) in_edge = place.node->num_blocks;
  } else if (const TreeNode* child = siblings_.longest_common(place.node, tokens, start, count).child) {
    if (child->num_pins == 0) num_held += child->num_device_blocks();
  }
  for (const TreeNode* node = place.node; !node->is_root(); node = node->parent, in_edge = node->num_blocks)
    if (node->num_pins == 0) num_held += std::min(in_edge, node->num_device_blocks());
  return num_held;
}

std::vector<std::string> PrefixTree::names(int64_t limit, std::string_view begin) const {
  std::lock_guard lock(mutex_);
  check(limit >= 0, "limit must not be negative, got ", limit);
  std::vector<std::string> found;
  for (auto next = roots_.lower_bound(begin); next != roots_.end(); ++next) {
    if (static_cast<int64_t>(found.size()) == limit) break;
    if (next->second->num_children > 0) found.push_back(next->first);
  }
  return found;
}

}  // namespace kvpage
