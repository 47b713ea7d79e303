#include "attention/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "base/check.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kRowsPerHead = 32;    // queries of a task: as many as give so many rows of one KV head
constexpr int64_t kRowsPerTask = 64;    // KV heads of a task: as many as give so many rows
constexpr int64_t kLeastKeys = 256;     // a split shorter than this costs more than it gains
constexpr int64_t kTasksPerThread = 4;  // so that threads end at about the same time
constexpr int64_t kGrainBytes = 512 << 10;  // of keys and values for a thread, read once a query

// The first key that any query of a sequence sees from `position` on.
int64_t first_key(const PagedAttention& args, int64_t position) {
  return position < args.window ? 0 : position - args.window + 1;
}

// Returns the position of a query of a sequence whose first query is row `row`.
int64_t position_of(const PagedAttention& args, int64_t seq, int64_t row, int64_t query) {
  return args.positions ? args.positions[row + query] : args.seq_lens[seq] - args.query_lens[seq] + query;
}

void check_positions(const PagedAttention& args, int64_t seq, int64_t row) {
  int64_t before = -1;
  for (int64_t query = 0; query < args.query_lens[seq]; ++query) {
    const int64_t position = args.positions[row + query];
    check(position > before && position < args.seq_lens[seq], "query_positions must ascend within [0, ",
          args.seq_lens[seq], ") in sequence ", seq, ", got ", position, " after ", before);
    before = position;
  }
}

void check_kinds(const PagedAttention& args) {
  const auto query = static_cast<int>(args.query_type), cache = static_cast<int>(args.cache_type);
  const auto code_type = static_cast<int>(args.code_type);
  check(query >= 0 && query <= 2 && cache >= 0 && cache <= 2, "types must be 0, 1 or 2, got ", query, " and ", cache);
  check(code_type >= 0 && code_type <= static_cast<int>(CodeType::kInt8), "code_type must be in [0, 3], got ",
        code_type);
  const int64_t bytes = args.code_type != CodeType::kBits ? 1 : cache == 0 ? 4 : 2;
  for (const KVPart& part : {args.key_cache, args.value_cache}) {
    check(part.element_bytes == bytes, "element_bytes must be ", bytes, " for this type, got ", part.element_bytes);
    check(part.run_size > 0, "run_size must be positive, got ", part.run_size);
    check(args.code_type != CodeType::kInt8 || part.scales, "int8 must have scales in its blocks, got none");
  }
}

void check_sizes(const PagedAttention& args) {
  check(args.num_kv_heads > 0 && args.group_size > 0 && args.key_size > 0 && args.value_size > 0,
        "heads and their sizes must be positive, got ", args.num_kv_heads, " heads for ", args.group_size,
        " each, sizes ", args.key_size, " and ", args.value_size);
  check(args.window > 0, "window must be positive, got ", args.window);
  args.tables.check_sizes();
  check_kinds(args);
}

void check_sequences(const PagedAttention& args) {
  int64_t num_tokens = 0;
  for (int64_t seq = 0; seq < args.tables.num_seqs; ++seq) {
    const int64_t length = args.seq_lens[seq], queries = args.query_lens[seq];
    check(length >= 0 && length <= args.tables.capacity(), "seq_lens[", seq, "] must be in [0, ",
          args.tables.capacity(), "], got ", length);
    check(queries >= 0 && queries <= length, "query_lens[", seq, "] must be in [0, seq_lens = ", length, "], got ",
          queries);
    num_tokens += queries;
  }
  check(num_tokens == args.num_tokens, "query_lens must sum up to the ", args.num_tokens, " rows of query, got ",
        num_tokens);
  int64_t row = 0;
  for (int64_t seq = 0; seq < args.tables.num_seqs; row += args.query_lens[seq++]) {
    const int64_t queries = args.query_lens[seq];
    if (queries == 0) continue;
    if (args.positions) check_positions(args, seq, row);
    args.tables.check_range(seq, first_key(args, position_of(args, seq, row, 0)),
                            position_of(args, seq, row, queries - 1) + 1);
  }
}

// K and V as tasks expand them, where they cannot be read in place.
struct Sources {
  TileSource key, value;
  bool expands, is_latent;

  explicit Sources(const PagedAttention& args)
      : key(source(args, args.key_cache, args.key_scales, args.key_scale_stride)),
        value(source(args, args.value_cache, args.value_scales, args.value_scale_stride)),
        expands(args.code_type != CodeType::kBits || args.key_cache.run_size < args.key_size ||
                args.value_cache.run_size < args.value_size),
        is_latent(args.value_cache.data == args.key_cache.data && args.value_size <= args.key_size) {}

 private:
  static TileSource source(const PagedAttention& args, const KVPart& part, const float* scales, int64_t stride) {
    return {part, args.code_type, static_cast<RowType>(args.cache_type), scales, stride};
  }
};

// Tasks over the same rows and different keys are neighbours; the first of them takes the others' results.
struct Plan {
  std::vector<AttentionTask> tasks;
  std::vector<int64_t> first;   // of each task: the first task of its rows
  std::vector<int64_t> splits;  // of each first task: how many there are
  int64_t num_keys = 0;         // read by all tasks, times KV heads
};

AttentionTask whole_task(const PagedAttention& args, const Sources& sources, int64_t seq, int64_t row, int64_t query,
                         int64_t num_queries, int64_t head, int64_t num_heads) {
  const int64_t position = position_of(args, seq, row, query);
  const int64_t query_head = head * args.group_size;
  AttentionTask task{};
  task.query = args.query.row(row + query) + query_head * args.query.head_stride;
  task.out = args.out.row(row + query) + query_head * args.out.head_stride;
  task.key = args.key_cache.data + head * args.key_cache.head_stride;
  task.value = args.value_cache.data + head * args.value_cache.head_stride;
  task.query_type = args.query_type, task.cache_type = args.cache_type;
  task.query_token_stride = args.query.token_stride, task.query_head_stride = args.query.head_stride;
  task.out_token_stride = args.out.token_stride, task.out_head_stride = args.out.head_stride;
  task.key_block_stride = args.key_cache.block_stride, task.value_block_stride = args.value_cache.block_stride;
  task.key_token_stride = args.key_cache.token_stride, task.value_token_stride = args.value_cache.token_stride;
  task.key_head_stride = args.key_cache.head_stride, task.value_head_stride = args.value_cache.head_stride;
  task.table = args.tables.row(seq), task.block_size = args.tables.block_size;
  task.num_kv_heads = num_heads, task.num_queries = num_queries, task.group_size = args.group_size;
  task.key_size = args.key_size, task.value_size = args.value_size;
  task.key_begin = first_key(args, position);
  task.key_end = position_of(args, seq, row, query + num_queries - 1) + 1;
  task.first_position = position, task.window = args.window;
  task.positions = args.positions ? args.positions + row + query : nullptr;
  task.scale = args.scale, task.softcap = args.softcap;
  task.sinks = args.sinks ? args.sinks + query_head : nullptr;
  task.first_head = head;
  if (sources.expands) {
    task.expanded_key = &sources.key;
    task.expanded_value = sources.is_latent ? &sources.key : &sources.value;
  }
  return task;
}

std::vector<AttentionTask> whole_tasks(const PagedAttention& args, const Sources& sources) {
  std::vector<AttentionTask> tasks;
  const int64_t max_queries = std::max<int64_t>(kRowsPerHead / args.group_size, 1);
  int64_t row = 0;
  for (int64_t seq = 0; seq < args.tables.num_seqs; row += args.query_lens[seq++])
    for (int64_t query = 0; query < args.query_lens[seq]; query += max_queries) {
      const int64_t num_queries = std::min(max_queries, args.query_lens[seq] - query);
      const int64_t max_heads = std::max<int64_t>(kRowsPerTask / (num_queries * args.group_size), 1);
      for (int64_t head = 0; head < args.num_kv_heads; head += max_heads)
        tasks.push_back(whole_task(args, sources, seq, row, query, num_queries, head,
                                   std::min(max_heads, args.num_kv_heads - head)));
    }
  return tasks;
}

int64_t num_keys(const AttentionTask& task) { return task.key_end - task.key_begin; }

// Longest first, so that no thread begins a long one when the others are done; then cut to at most `max_keys`.
Plan split_tasks(std::vector<AttentionTask> whole, int64_t max_keys) {
  std::stable_sort(whole.begin(), whole.end(), [](const auto& a, const auto& b) { return num_keys(a) > num_keys(b); });
  Plan plan;
  for (const AttentionTask& task : whole) {
    const int64_t first = static_cast<int64_t>(plan.tasks.size()), keys = num_keys(task);
    const int64_t parts = (keys + max_keys - 1) / max_keys;
    for (int64_t part = 0; part < parts; ++part) {
      plan.tasks.push_back(task);
      plan.tasks.back().key_begin = task.key_begin + keys * part / parts;
      plan.tasks.back().key_end = task.key_begin + keys * (part + 1) / parts;
      plan.first.push_back(first);
      plan.splits.push_back(parts);
    }
  }
  return plan;
}

// Uninitialised floats on a cache line's boundary, handed out part by part.
class Arena {
 public:
  explicit Arena(int64_t size)
      : data_(static_cast<float*>(::operator new(static_cast<size_t>(size) * sizeof(float), std::align_val_t(64)))) {}

  float* take(int64_t size) {
    float* taken = data_.get() + used_;
    used_ += round_up(size);
    return taken;
  }

  static int64_t round_up(int64_t size) { return (size + kRowPadding - 1) / kRowPadding * kRowPadding; }

 private:
  struct Delete {
    void operator()(float* data) const { ::operator delete(data, std::align_val_t(64)); }
  };
  std::unique_ptr<float, Delete> data_;
  int64_t used_ = 0;
};

// Floats that the state and the scratch of a task take.
struct Sizes {
  int64_t sums, rows, queries, scores;
  int64_t keys = 0, values = 0, codes = 0;  // of tasks that expand tiles

  explicit Sizes(const AttentionTask& task) {
    const int64_t head_rows = task.num_queries * task.group_size;
    rows = head_rows * task.num_kv_heads;
    sums = rows * Arena::round_up(task.value_size);
    queries = rows * Arena::round_up(task.key_size);
    scores = head_rows * kTileKeys;
    if (!task.expanded_key) return;
    keys = kTileKeys * Arena::round_up(task.key_size);
    values = kTileKeys * Arena::round_up(task.value_size);
    codes = kTileKeys * std::max(task.key_size, task.value_size);  // an element is no larger than a float
  }
  int64_t state() const { return Arena::round_up(sums) + 2 * Arena::round_up(rows); }
  int64_t scratch() const {
    return Arena::round_up(queries) + Arena::round_up(scores) + Arena::round_up(keys) + Arena::round_up(values) +
           Arena::round_up(codes);
  }
};

AttentionState take_state(Arena& arena, const Sizes& sizes) {
  return {arena.take(sizes.sums), arena.take(sizes.rows), arena.take(sizes.rows)};
}

void run_task(const AttentionKernel& kernel, Plan& plan, int64_t index, std::atomic<int64_t>& left,
              const AttentionScratch& scratch, const AttentionState& own_state) {
  AttentionTask& task = plan.tasks[index];
  const int64_t splits = plan.splits[index];
  if (splits == 1) task.state = own_state;
  kernel.attend(task, scratch);
  if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const AttentionTask& first = plan.tasks[plan.first[index]];
  for (int64_t split = 1; split < splits; ++split) kernel.merge(first, plan.tasks[plan.first[index] + split].state);
  kernel.finish(first);
}

}  // namespace

void paged_attention(const PagedAttention& args) {
  const AttentionKernel& kernel = attention_kernels().named(args.kernel);
  check_sizes(args);
  check_sequences(args);
  const Sources sources(args);
  std::vector<AttentionTask> whole = whole_tasks(args, sources);
  if (whole.empty()) return;
  int64_t keys = 0, bytes = 0;
  const int64_t element_bytes = args.key_cache.element_bytes;
  for (const AttentionTask& task : whole) {
    keys += num_keys(task);
    bytes += num_keys(task) * task.num_kv_heads * task.num_queries * (args.key_size + args.value_size) * element_bytes;
  }
  const int num_threads = useful_threads(bytes, kGrainBytes, args.max_threads);
  const int64_t max_keys =
      num_threads == 1 ? keys : std::max(kLeastKeys, keys / (num_threads * kTasksPerThread) + kTileKeys);
  Plan plan = split_tasks(std::move(whole), max_keys);

  // States of split tasks outlive their thread's work on them; a whole task's is its thread's own.
  Sizes most{plan.tasks[0]};
  int64_t shared = 0;
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    const Sizes sizes{plan.tasks[i]};
    most.sums = std::max(most.sums, sizes.sums), most.rows = std::max(most.rows, sizes.rows);
    most.queries = std::max(most.queries, sizes.queries), most.scores = std::max(most.scores, sizes.scores);
    if (plan.splits[i] > 1) shared += sizes.state();
  }
  Arena arena(shared + num_threads * (most.state() + most.scratch()));
  for (size_t i = 0; i < plan.tasks.size(); ++i)
    if (plan.splits[i] > 1) plan.tasks[i].state = take_state(arena, Sizes{plan.tasks[i]});
  std::vector<AttentionScratch> scratch;
  std::vector<AttentionState> states;
  for (int i = 0; i < num_threads; ++i) {
    states.push_back(take_state(arena, most));
    scratch.push_back({arena.take(most.queries), arena.take(most.scores), arena.take(most.keys),
                       arena.take(most.values), reinterpret_cast<std::byte*>(arena.take(most.codes))});
  }

  const int64_t num_tasks = static_cast<int64_t>(plan.tasks.size());
  std::vector<std::atomic<int64_t>> left(plan.tasks.size());
  for (int64_t i = 0; i < num_tasks; ++i) left[i] = plan.splits[i];
  std::atomic<int64_t> next{0};
  run_shares(num_threads, [&](int share) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;)
      run_task(kernel, plan, i, left[plan.first[i]], scratch[share], states[share]);
  });
}

}  // namespace kvpage
