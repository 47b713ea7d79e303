#include "attention/attention_plan.h"

#include <algorithm>

#include "base/parallel.h"

namespace kvpage {
namespace {

// Rows of a unit: enough that turning a tile of keys is little beside its products, and that the second cache holds
// their queries and sums.
constexpr int64_t kLeastRows = 64, kMostRowBytes = 128 << 10;
constexpr int64_t kRowsPerTask = 128;  // KV heads of a task: as many as give so many rows
constexpr int64_t kTasksPerThread = 4;  // so that threads end at about the same time
constexpr int64_t kGrainBytes = 512 << 10;  // of keys and values for a thread, read once a query

// The tables' order, as far as their keys need them: spans that begin with the same blocks become neighbours.
bool comes_before(const AttentionSpan& a, const AttentionSpan& b, int64_t block_size) {
  if (a.table == b.table) return false;
  const int64_t a_blocks = (a.key_end + block_size - 1) / block_size,
                b_blocks = (b.key_end + block_size - 1) / block_size;
  return std::lexicographical_compare(a.table, a.table + a_blocks, b.table, b.table + b_blocks);
}

// Rows that a unit has at most: all threads shall have some.
int64_t rows_of_unit(const PagedAttention& args) {
  const int64_t fit = kMostRowBytes / ((args.key_size + args.value_size) * static_cast<int64_t>(sizeof(float)));
  const int64_t tasks = std::max(args.max_threads, 1) * kTasksPerThread / 2;
  const int64_t fair = args.num_tokens * args.num_kv_heads * args.group_size / tasks;
  return std::max(kLeastRows, std::min(fit, fair));
}

// About how long a task takes.
int64_t cost(const AttentionTask& task) { return (task.key_end - task.key_begin) * task.num_rows * task.num_heads; }

}  // namespace

AttentionPlan::AttentionPlan(const PagedAttention& args, const AttentionLayer& layer) : max_rows_(rows_of_unit(args)) {
  make_spans(args);
  make_units(args);
  make_tasks(args, layer);
}

void AttentionPlan::make_spans(const PagedAttention& args) {
  const int64_t max_queries = std::max<int64_t>(max_rows_ / args.group_size, 1);
  int64_t row = 0, bytes = 0;
  const int64_t row_bytes = (args.key_size + args.value_size) * args.key_cache.element_bytes * args.num_kv_heads;
  for (int64_t seq = 0; seq < args.tables.num_seqs; row += args.query_lens[seq++])
    for (int64_t query = 0; query < args.query_lens[seq]; query += max_queries) {
      AttentionSpan span{};
      span.num_queries = std::min(max_queries, args.query_lens[seq] - query);
      span.query = args.query.row(row + query), span.out = args.out.row(row + query);
      span.table = args.tables.row(seq);
      span.first_position = position_of(args, seq, row, query);
      span.positions = args.positions ? args.positions + row + query : nullptr;
      span.key_begin = first_key(args, span.first_position);
      span.key_end = position_of(args, seq, row, query + span.num_queries - 1) + 1;
      bytes += (span.key_end - span.key_begin) * span.num_queries * row_bytes;
      spans_.push_back(span);
    }
  num_threads = useful_threads(bytes, kGrainBytes, args.max_threads);
}

void AttentionPlan::make_units(const PagedAttention& args) {
  const int64_t block_size = args.tables.block_size;
  std::stable_sort(spans_.begin(), spans_.end(),
                   [&](const auto& a, const auto& b) { return comes_before(a, b, block_size); });
  for (int64_t i = 0; i < static_cast<int64_t>(spans_.size()); ++i) {
    const AttentionSpan& span = spans_[i];
    const int64_t rows = span.num_queries * args.group_size;
    if (!units_.empty() && units_.back().num_rows + rows <= max_rows_) {
      Unit& unit = units_.back();
      const int64_t begin = std::max(spans_[i - 1].key_begin, span.key_begin) / kTileKeys * kTileKeys;
      if (share_blocks(spans_[i - 1], span, begin, begin + kTileKeys, block_size)) {
        unit.last = i + 1, unit.num_rows += rows;
        unit.key_begin = std::min(unit.key_begin, span.key_begin), unit.key_end = std::max(unit.key_end, span.key_end);
        continue;
      }
    }
    units_.push_back({i, i + 1, rows, span.key_begin, span.key_end});
  }
}

void AttentionPlan::make_tasks(const PagedAttention& args, const AttentionLayer& layer) {
  const int64_t enough = num_threads == 1 ? 1 : num_threads * kTasksPerThread;
  std::vector<AttentionTask> whole;
  for (const Unit& unit : units_) {
    const bool is_alone = static_cast<int64_t>(units_.size()) < enough && num_threads > 1;
    const int64_t max_heads = is_alone ? 1 : std::max<int64_t>(kRowsPerTask / unit.num_rows, 1);
    for (int64_t head = 0; head < args.num_kv_heads; head += max_heads) {
      AttentionTask task{};
      task.layer = &layer, task.spans = &spans_[unit.first];
      task.num_spans = unit.last - unit.first, task.num_rows = unit.num_rows;
      task.first_head = head, task.num_heads = std::min(max_heads, args.num_kv_heads - head);
      task.key_begin = unit.key_begin, task.key_end = unit.key_end;
      whole.push_back(task);
    }
  }
  // Longest first, so that no thread begins a long one when the others are done.
  std::stable_sort(whole.begin(), whole.end(), [](const auto& a, const auto& b) { return cost(a) > cost(b); });
  int64_t total = 0;
  for (const AttentionTask& task : whole) total += cost(task);
  for (const AttentionTask& task : whole) add_tasks(task, num_threads > 1 && cost(task) > total / enough);
}

void AttentionPlan::add_tasks(const AttentionTask& whole, bool in_parts) {
  const int64_t index = static_cast<int64_t>(tasks.size());
  for (int64_t begin = whole.key_begin; begin < whole.key_end;) {
    const int64_t end = in_parts ? std::min(begin / kPartKeys * kPartKeys + kPartKeys, whole.key_end) : whole.key_end;
    tasks.push_back(whole);
    tasks.back().key_begin = begin, tasks.back().key_end = end;
    begin = end;
  }
  const int64_t parts = static_cast<int64_t>(tasks.size()) - index;
  first.insert(first.end(), parts, index);
  num_parts.insert(num_parts.end(), parts, parts);
}

}  // namespace kvpage
