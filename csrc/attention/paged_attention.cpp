#include "attention/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "attention/attention_plan.h"
#include "base/check.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

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

AttentionLayer layer_of(const PagedAttention& args, const Sources& sources) {
  AttentionLayer layer{};
  layer.key = args.key_cache.data, layer.value = args.value_cache.data;
  layer.query_type = args.query_type, layer.cache_type = args.cache_type;
  layer.query_token_stride = args.query.token_stride, layer.query_head_stride = args.query.head_stride;
  layer.out_token_stride = args.out.token_stride, layer.out_head_stride = args.out.head_stride;
  layer.key_block_stride = args.key_cache.block_stride, layer.value_block_stride = args.value_cache.block_stride;
  layer.key_token_stride = args.key_cache.token_stride, layer.value_token_stride = args.value_cache.token_stride;
  layer.key_head_stride = args.key_cache.head_stride, layer.value_head_stride = args.value_cache.head_stride;
  layer.block_size = args.tables.block_size, layer.group_size = args.group_size;
  layer.key_size = args.key_size, layer.value_size = args.value_size;
  layer.window = args.window, layer.scale = args.scale, layer.softcap = args.softcap, layer.sinks = args.sinks;
  if (sources.expands) {
    layer.expanded_key = &sources.key;
    layer.expanded_value = sources.is_latent ? &sources.key : &sources.value;
  }
  return layer;
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

// Floats that the states and the scratch of a call's tasks take.
struct Sizes {
  int64_t rows = 0, head_rows = 0;  // of the largest task
  int64_t key_row, value_row;
  bool expands;

  Sizes(const AttentionPlan& plan, const AttentionLayer& layer)
      : key_row(Arena::round_up(layer.key_size)),
        value_row(Arena::round_up(layer.value_size)),
        expands(layer.expanded_key) {
    for (const AttentionTask& task : plan.tasks) {
      rows = std::max(rows, task.num_rows * task.num_heads);
      head_rows = std::max(head_rows, task.num_rows);
    }
  }

  int64_t state(int64_t num_rows) const { return num_rows * value_row + 2 * Arena::round_up(num_rows); }
  int64_t scratch() const {
    const int64_t expanded = expands ? kTileKeys * (key_row + value_row + std::max(key_row, value_row)) : 0;
    return state(rows) + rows * key_row + head_rows * kTileKeys + 2 * Arena::round_up(head_rows) +
           Arena::round_up(2 * head_rows) + kTileKeys * (key_row + value_row + kRowPadding) + expanded;
  }
  AttentionState take_state(Arena& arena, int64_t num_rows) const {
    return {arena.take(num_rows * value_row), arena.take(num_rows), arena.take(num_rows)};
  }
  AttentionScratch take_scratch(Arena& arena) const {
    AttentionScratch scratch{};
    scratch.part = take_state(arena, rows);
    scratch.queries = arena.take(rows * key_row);
    scratch.scores = arena.take(head_rows * kTileKeys);
    scratch.factors = arena.take(head_rows), scratch.totals = arena.take(head_rows);
    scratch.seen = reinterpret_cast<TileRange*>(arena.take(2 * head_rows));
    scratch.turned = arena.take(kTileKeys * key_row);
    scratch.packed = arena.take(kTileKeys * (value_row + kRowPadding));
    if (!expands) return scratch;
    scratch.keys = arena.take(kTileKeys * key_row);
    scratch.values = arena.take(kTileKeys * value_row);
    scratch.codes = reinterpret_cast<std::byte*>(arena.take(kTileKeys * std::max(key_row, value_row)));
    return scratch;
  }
};

void run_task(const AttentionKernel& kernel, AttentionPlan& plan, int64_t index, std::atomic<int64_t>& left,
              const AttentionScratch& scratch, const AttentionState& own_state) {
  AttentionTask& task = plan.tasks[index];
  const int64_t first = plan.first[index], parts = plan.num_parts[index];
  if (parts == 1) task.state = own_state;
  kernel.attend(task, scratch);
  if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  for (int64_t part = 1; part < parts; ++part) kernel.merge(plan.tasks[first], plan.tasks[first + part].state);
  kernel.finish(plan.tasks[first]);
}

void run_plan(const AttentionKernel& kernel, AttentionPlan& plan, const AttentionLayer& layer) {
  // States of tasks in parts outlive their thread's work on them; a whole task's is its thread's own.
  const Sizes sizes(plan, layer);
  const int64_t num_tasks = static_cast<int64_t>(plan.tasks.size());
  int64_t kept = 0;
  for (int64_t i = 0; i < num_tasks; ++i)
    if (plan.num_parts[i] > 1) kept += sizes.state(plan.tasks[i].num_rows * plan.tasks[i].num_heads);
  Arena arena(kept + plan.num_threads * (sizes.state(sizes.rows) + sizes.scratch()));
  for (int64_t i = 0; i < num_tasks; ++i)
    if (plan.num_parts[i] > 1)
      plan.tasks[i].state = sizes.take_state(arena, plan.tasks[i].num_rows * plan.tasks[i].num_heads);
  std::vector<AttentionScratch> scratch;
  std::vector<AttentionState> states;
  for (int i = 0; i < plan.num_threads; ++i) {
    states.push_back(sizes.take_state(arena, sizes.rows));
    scratch.push_back(sizes.take_scratch(arena));
  }
  std::vector<std::atomic<int64_t>> left(plan.tasks.size());
  for (int64_t i = 0; i < num_tasks; ++i) left[i] = plan.num_parts[i];
  std::atomic<int64_t> next{0};
  run_shares(plan.num_threads, [&](int share) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;)
      run_task(kernel, plan, i, left[plan.first[i]], scratch[share], states[share]);
  });
}

}  // namespace

void paged_attention(const PagedAttention& args) {
  const AttentionKernel& kernel = attention_kernels().named(args.kernel);
  check_sizes(args);
  check_sequences(args);
  const Sources sources(args);
  const AttentionLayer layer = layer_of(args, sources);
  AttentionPlan plan(args, layer);
  if (!plan.tasks.empty()) run_plan(kernel, plan, layer);
}

}  // namespace kvpage
