#include "copy/plan/copy_plan.h"

#include <algorithm>

#include "base/check.h"

namespace kvpage {
namespace {

// A set of block ids under `num_blocks`, as bits.
class BlockSet {
 public:
  explicit BlockSet(int64_t num_blocks) : words_((num_blocks + 63) / 64) {}
  bool has(int64_t id) const { return words_[id / 64] >> (id % 64) & 1; }
  void add(int64_t id) { words_[id / 64] |= uint64_t{1} << (id % 64); }

 private:
  std::vector<uint64_t> words_;
};

void check_range(int64_t id, int64_t num_blocks, const char* side, int64_t row) {
  check(id >= 0 && id < num_blocks, "block_mapping must name ", side, " blocks in [0, ", num_blocks, "), got ", id,
        " in row ", row);
}

}  // namespace

CopyPlan::CopyPlan(const CopyGeometry& geometry, const int64_t* pairs, int64_t num_pairs) : geometry_(geometry) {
  read_pairs(pairs, num_pairs);
  merge_runs();
}

void CopyPlan::read_pairs(const int64_t* pairs, int64_t num_pairs) {
  const bool same = geometry_.same_memory();
  BlockSet named(geometry_.num_dst_blocks()), changed(same ? geometry_.num_dst_blocks() : 0);
  check(num_pairs >= 0, "num_pairs must not be negative, got ", num_pairs);
  pairs_.reserve(static_cast<size_t>(std::min(num_pairs, geometry_.num_dst_blocks())));
  for (int64_t row = 0; row < num_pairs; ++row) {
    const int64_t src_id = pairs[2 * row], dst_id = pairs[2 * row + 1];
    check_range(src_id, geometry_.num_src_blocks(), "source", row);
    check_range(dst_id, geometry_.num_dst_blocks(), "destination", row);
    check(!named.has(dst_id), "block_mapping must name each destination once, got ", dst_id, " again in row ", row);
    named.add(dst_id);
    if (same && src_id == dst_id) continue;
    if (same) changed.add(dst_id);
    pairs_.push_back({static_cast<int32_t>(src_id), static_cast<int32_t>(dst_id)});
  }
  if (!same) return;
  for (const BlockPair& pair : pairs_) {
    check(!changed.has(pair.src_id), "block_mapping must not read a block that it also writes, got block ", pair.src_id,
          " on both sides");
  }
}

void CopyPlan::merge_runs() {
  auto before = [](const BlockPair& a, const BlockPair& b) { return a.src_id < b.src_id; };
  if (!std::is_sorted(pairs_.begin(), pairs_.end(), before)) std::stable_sort(pairs_.begin(), pairs_.end(), before);
  runs_.reserve(pairs_.size());
  for (const BlockPair& pair : pairs_) {
    BlockRun* last = runs_.empty() ? nullptr : &runs_.back();
    if (last && geometry_.fills_steps() && pair.src_id == last->src_id + last->count &&
        pair.dst_id == last->dst_id + last->count) {
      ++last->count;
    } else {
      runs_.push_back({pair.src_id, pair.dst_id, 1});
    }
  }
}

}  // namespace kvpage
