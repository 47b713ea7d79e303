#include "attention/shared_prefixes.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "base/check.h"

namespace kvpage {
namespace {

constexpr int kNone = -1;
constexpr int64_t kMostKeys = UINT32_MAX;  // of a group
constexpr int64_t kBlocksAtOnce = 128;  // ids that are compared by one call

// Sequences that share `depth` keys: `count` places of the order from `first` on. Its children share more.
struct Node {
  int64_t first, count, depth;
  int child, sibling;
};

struct Group {
  int64_t first, count, begin, end;
  bool is_inner;

  int64_t saved() const { return (end - begin) * (count - 1); }
};

// The tree of all prefixes that two sequences or more share, in whole granules.
class PrefixForest {
 public:
  PrefixForest(const BlockTables& tables, const int64_t* lengths, int64_t granule)
      : tables_(tables), granule_(granule), order_(tables.num_seqs), most_(tables.num_seqs) {
    for (int64_t seq = 0; seq < tables.num_seqs; ++seq)
      most_[seq] = std::clamp<int64_t>(std::min(lengths[seq], tables.capacity()) - 1, 0, kMostKeys) / granule * granule;
    std::iota(order_.begin(), order_.end(), 0);
    root_ = split(0, tables.num_seqs, 0);
  }

  const std::vector<int64_t>& order() const { return order_; }

  // Returns the groups that save the most keys, none of which saves less than `least`.
  std::vector<Group> choose(int64_t least) const {
    std::vector<Group> groups;
    choose_outer(root_, least, &groups);
    return groups;
  }

 private:
  // A number to sort by in the upper half, and a sequence in the lower one.
  using Keyed = uint64_t;
  static constexpr uint32_t kLast = UINT32_MAX;
  static Keyed keyed_by(uint32_t key, int64_t seq) { return uint64_t{key} << 32 | static_cast<uint64_t>(seq); }
  static uint32_t key_of(Keyed keyed) { return static_cast<uint32_t>(keyed >> 32); }
  static int64_t seq_of(Keyed keyed) { return static_cast<uint32_t>(keyed); }

  static void sort(std::vector<Keyed>* keyed) {
    if (!std::is_sorted(keyed->begin(), keyed->end())) std::sort(keyed->begin(), keyed->end());
  }

  // Sorts places [first, end), which share `base` keys. Returns the first of the nodes that share more, or kNone.
  // A block's id stands for those before it, as in tables of a prefix tree: `grow` compares them.
  int split(int64_t first, int64_t end, int64_t base) {
    if (end - first < 2) return kNone;
    const int64_t block = (base + granule_ - 1) / tables_.block_size;
    const int64_t count = end - first;
    std::vector<Keyed> keyed;
    keyed.reserve(count);
    for (int64_t i = first; i < end; ++i) {
      const int64_t seq = order_[i];
      keyed.push_back(keyed_by(most_[seq] > base ? static_cast<uint32_t>(tables_.row(seq)[block]) : kLast, seq));
    }
    sort(&keyed);
    for (int64_t i = 0; i < count; ++i) order_[first + i] = seq_of(keyed[i]);
    int found = kNone;
    for (int64_t run = 0, next; run < count && key_of(keyed[run]) != kLast; run = next) {
      for (next = run + 1; next < count && key_of(keyed[next]) == key_of(keyed[run]);) ++next;
      const int grown = next - run == 1 ? kNone : grow(first + run, first + next, base);
      if (grown != kNone) nodes_[grown].sibling = found, found = grown;
    }
    return found;
  }

  // Sorts places [first, end) by the keys that they share with the first one. Returns the node of all that share more
  // than `base` with it, or kNone.
  int grow(int64_t first, int64_t end, int64_t base) {
    const int64_t leader = order_[first];
    std::vector<Keyed> keyed;
    keyed.reserve(end - first);
    for (int64_t i = first + 1; i < end; ++i)
      keyed.push_back(keyed_by(kLast - static_cast<uint32_t>(shared_keys(leader, order_[i], base)), order_[i]));
    sort(&keyed);
    for (size_t i = 0; i < keyed.size(); ++i) order_[first + 1 + i] = seq_of(keyed[i]);
    int inner = kNone;
    for (size_t i = 0, next; i < keyed.size(); i = next) {
      const int64_t shared = kLast - key_of(keyed[i]);
      if (shared == base) break;
      for (next = i + 1; next < keyed.size() && key_of(keyed[next]) == key_of(keyed[i]);) ++next;
      const auto place = static_cast<int64_t>(first + 1 + i), after = static_cast<int64_t>(first + 1 + next);
      int children = split(place, after, shared);
      if (inner != kNone) nodes_[inner].sibling = children, children = inner;
      nodes_.push_back({first, after - first, shared, children, kNone});
      inner = static_cast<int>(nodes_.size()) - 1;
    }
    return inner;
  }

  // Returns the keys, in whole granules, that two sequences share, which share `base`.
  int64_t shared_keys(int64_t a, int64_t b, int64_t base) const {
    const int32_t *a_ids = tables_.row(a), *b_ids = tables_.row(b);
    const int64_t most = std::min(most_[a], most_[b]);
    const int64_t end = (most + tables_.block_size - 1) / tables_.block_size;
    int64_t block = base / tables_.block_size;
    while (block + kBlocksAtOnce <= end && !std::memcmp(a_ids + block, b_ids + block, 4 * kBlocksAtOnce))
      block += kBlocksAtOnce;
    while (block < end && a_ids[block] == b_ids[block]) ++block;
    return std::max(std::min(block * tables_.block_size, most) / granule_ * granule_, base);
  }

  // Adds the best groups of a node, and of its siblings, to `groups`. Returns the keys that they save.
  int64_t choose_outer(int index, int64_t least, std::vector<Group>* groups) const {
    int64_t total = 0;
    for (; index != kNone; index = nodes_[index].sibling) {
      const Node& node = nodes_[index];
      std::vector<Group> nested{{node.first, node.count, 0, node.depth, false}}, apart;
      const int64_t own = node.depth * (node.count - 1);
      const int64_t saved = own < least ? 0 : own + choose_inner(node.child, node.depth, least, &nested);
      const int64_t saved_apart = choose_outer(node.child, least, &apart);
      if (saved < least) nested.clear();
      const auto& better = saved >= saved_apart ? nested : apart;
      groups->insert(groups->end(), better.begin(), better.end());
      total += std::max(saved, saved_apart);
    }
    return total;
  }

  // The same of groups that begin at key `base`, where an outer one ends.
  int64_t choose_inner(int index, int64_t base, int64_t least, std::vector<Group>* groups) const {
    int64_t total = 0;
    for (; index != kNone; index = nodes_[index].sibling) {
      const Node& node = nodes_[index];
      const auto before = groups->size();
      const int64_t own = (node.depth - base) * (node.count - 1), saved = own < least ? 0 : own;
      const int64_t saved_apart = choose_inner(node.child, base, least, groups);
      if (saved > saved_apart) {
        groups->resize(before);
        groups->push_back({node.first, node.count, base, node.depth, true});
      }
      total += std::max(saved, saved_apart);
    }
    return total;
  }

  const BlockTables& tables_;
  const int64_t granule_;
  std::vector<int64_t> order_, most_;  // most_: keys of each sequence that others may share
  std::vector<Node> nodes_;
  int root_;
};

// Leaves the groups that save the most. An inner group whose outer one goes begins with the first key.
void leave_best(int64_t num_groups, std::vector<Group>* groups) {
  if (static_cast<int64_t>(groups->size()) <= num_groups) return;
  std::vector<int64_t> saved;
  for (const Group& group : *groups) saved.push_back(group.saved());
  std::nth_element(saved.begin(), saved.begin() + num_groups - 1, saved.end(), std::greater<>());
  const int64_t least = saved[num_groups - 1];
  int64_t num_equal = num_groups - std::count_if(saved.begin(), saved.end(), [&](auto n) { return n > least; });
  std::vector<Group> left;
  bool has_outer = false;
  for (Group group : *groups) {
    const bool is_left = group.saved() > least || (group.saved() == least && num_equal-- > 0);
    if (!group.is_inner) has_outer = is_left;
    if (!is_left) continue;
    if (!has_outer) group.begin = 0, group.is_inner = false;
    left.push_back(group);
  }
  groups->swap(left);
}

void write_nothing(int64_t* plan, int64_t num_rows) {
  std::fill(plan, plan + kPlanRows * num_rows, 0);
  std::fill(plan + kOuterGroup * num_rows, plan + kRank * num_rows, kNone);
  for (const int64_t row : {kRank, kOrder}) std::iota(plan + row * num_rows, plan + (row + 1) * num_rows, 0);
}

void write_group(const Group& group, int64_t number, int64_t* plan, int64_t num_rows) {
  const auto row = [&](PlanRow which) { return plan + which * num_rows; };
  row(kGroupFirst)[number] = group.first, row(kGroupCount)[number] = group.count;
  row(kKeyBegin)[number] = group.begin, row(kKeyEnd)[number] = group.end;
  for (int64_t place = group.first; place < group.first + group.count; ++place) {
    const int64_t seq = row(kOrder)[place];
    row(group.is_inner ? kInnerGroup : kOuterGroup)[seq] = number;
    row(kOwnBegin)[seq] = std::max(row(kOwnBegin)[seq], group.end);
  }
}

}  // namespace

int64_t share_prefixes(const BlockTables& tables, const int64_t* lengths, const SharingRules& rules, int64_t* plan,
                       int64_t num_rows) {
  tables.check_sizes();
  check(rules.granule > 0, "granule must be positive, got ", rules.granule);
  check(rules.least_saved > 0, "least_saved must be positive, got ", rules.least_saved);
  check(num_rows >= tables.num_seqs, "num_rows must be at least the ", tables.num_seqs, " sequences, got ", num_rows);
  check(0 <= rules.max_groups && rules.max_groups <= num_rows, "max_groups must be in [0, num_rows = ", num_rows,
        "], got ", rules.max_groups);
  write_nothing(plan, num_rows);
  if (rules.max_groups == 0) return 0;
  const PrefixForest forest(tables, lengths, rules.granule);
  auto groups = forest.choose(rules.least_saved);
  leave_best(rules.max_groups, &groups);
  if (groups.empty()) return 0;
  for (int64_t place = 0; place < tables.num_seqs; ++place) {
    plan[kOrder * num_rows + place] = forest.order()[place];
    plan[kRank * num_rows + forest.order()[place]] = place;
  }
  for (size_t number = 0; number < groups.size(); ++number)
    write_group(groups[number], static_cast<int64_t>(number), plan, num_rows);
  return static_cast<int64_t>(groups.size());
}

}  // namespace kvpage
