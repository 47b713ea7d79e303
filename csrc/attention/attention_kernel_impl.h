// The body of AttentionKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#include "attention/attention_kernel.h"
#include "attention/online_softmax_impl.h"
#include "attention/tile_products_impl.h"
#include "attention/tile_rows_impl.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

// From so many rows on, packing values costs less than reading them in place for each few rows.
constexpr int64_t kPackedRows = 3 * kMostRows;

inline int64_t sum_stride(const AttentionTask& task) { return padded(task.layer->value_size); }

// Neighbouring spans of a task, and their rows of a KV head.
struct SpanRun {
  int64_t first, last;  // spans
  int64_t row, num_rows;  // of KV head 0
};

// Whether queries, keys, weights and values are multiplied in pairs.
inline bool multiplies_pairs(const AttentionLayer& layer) {
  return kHasPairs && !layer.expanded_key && layer.query_type == ElementType::kBfloat16 &&
         layer.cache_type == ElementType::kBfloat16 && layer.key_size % 2 == 0;
}

template <typename T>
void load_queries(const AttentionTask& task, Rows queries) {
  const AttentionLayer& layer = *task.layer;
  const bool in_pairs = multiplies_pairs(layer);
  int64_t row = 0;
  for (int64_t head = 0; head < task.num_heads; ++head)
    for (int64_t s = 0; s < task.num_spans; ++s)
      for (int64_t token = 0; token < task.spans[s].num_queries; ++token)
        for (int64_t member = 0; member < layer.group_size; ++member, ++row) {
          const int64_t query_head = (task.first_head + head) * layer.group_size + member;
          const std::byte* from =
              task.spans[s].query + token * layer.query_token_stride + query_head * layer.query_head_stride;
          if (in_pairs)
            std::memcpy(queries[row], from, static_cast<size_t>(layer.key_size) * sizeof(T));
          else
            widen(reinterpret_cast<const T*>(from), layer.key_size, queries[row]);
        }
}

inline int64_t position_of(const AttentionSpan& span, int64_t query) {
  return span.positions ? span.positions[query] : span.first_position + query;
}

// The keys of the tile that begins at `begin` which each row of a run sees, at most [0, count).
void find_ranges(const AttentionTask& task, const SpanRun& run, int64_t begin, int64_t count, TileRange* seen) {
  const AttentionLayer& layer = *task.layer;
  for (int64_t s = run.first; s < run.last; ++s)
    for (int64_t token = 0; token < task.spans[s].num_queries; ++token) {
      const int64_t position = position_of(task.spans[s], token);
      const int64_t first = position < layer.window ? 0 : position - layer.window + 1;
      const TileRange range{static_cast<int32_t>(least(most(first - begin, 0), count)),
                            static_cast<int32_t>(most(least(position + 1 - begin, count), 0))};
      for (int64_t member = 0; member < layer.group_size; ++member) *seen++ = range;
    }
}

// The keys that any, and that all, of some rows see.
struct Ranges {
  TileRange any{kTileKeys, 0}, all{0, kTileKeys};

  Ranges(const TileRange* seen, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; ++r) {
      all = {all.first > seen[r].first ? all.first : seen[r].first, all.last < seen[r].last ? all.last : seen[r].last};
      if (is_empty(seen[r])) continue;
      any = {any.first < seen[r].first ? any.first : seen[r].first, any.last > seen[r].last ? any.last : seen[r].last};
    }
  }
};

// How often Prefetch takes a step while panels that hold `size` columns are multiplied by rows.
inline int64_t num_steps(int64_t num_rows, int64_t size) {
  return most((num_rows + kMostRows - 1) / kMostRows * (size / kPanel), 1);
}

template <typename Word, typename T>
void score_rows(Rows queries, int64_t num_rows, const TileRange* seen, int64_t size, const TileView<T>& tile,
                float* turned, Rows scores) {
  turn_keys<Word, T>(tile.keys, nullptr, tile.first, tile.last, size, turned);
  Prefetch soon(tile.next_values, size, num_steps(num_rows, kTileKeys));
  for_row_blocks(num_rows, [&](int64_t row, int64_t rows) {
    const TileRange any = Ranges(seen + row, rows).any;
    if (is_empty(any)) return;
    with_rows(rows, [&](auto constant) {
      score_panels<Word, constant.value>(queries.from(row), turned, size / kNumbers<Word>, any.first / kPanel,
                                         (any.last + kPanel - 1) / kPanel, scores.from(row), soon);
    });
  });
}

// Turns only as many keys as the next scores need: they are still in the first cache then, and memory is asked for the
// values all the while.
template <typename Word, typename T>
void score_few_rows(Rows queries, int64_t num_rows, const TileRange* seen, int64_t size, const TileView<T>& tile,
                    float* turned, Rows scores) {
  const TileRange any = Ranges(seen, num_rows).any;
  const int64_t last = (any.last + kPanel - 1) / kPanel, num_words = size / kNumbers<Word>;
  Prefetch nothing;
  with_rows(num_rows, [&](auto constant) {
    constexpr int kRows = constant.value;
    constexpr int64_t kPanels = most(num_columns(kRows) / kPanelVectors, 1);
    for (int64_t panel = any.first / kPanel; panel < last; panel += kPanels) {
      const int64_t next = least(panel + kPanels, last);
      float* base = turned - panel * kPanel * num_words;
      turn_keys<Word>(tile.keys, tile.next_values, panel * kPanel, next * kPanel, size, base);
      score_panels<Word, kRows>(queries, base, num_words, panel, next, scores, nothing);
    }
  });
}

// The keys of a range in words that it has wholly.
template <typename Word>
TileRange whole_words(TileRange range) {
  constexpr int32_t kStep = kNumbers<Word>;
  return {(range.first + kStep - 1) / kStep * kStep, range.last / kStep * kStep};
}

// call(row, its number of rows as a constant, first key, last key), for each row over its keys in their order; rows of
// a block go together where all see the keys of whole words, which are summed at once.
template <typename Word, typename Call>
void for_seen(const TileRange* seen, int64_t num_rows, const Call& call) {
  for_row_blocks(num_rows, [&](int64_t row, int64_t rows) {
    const std::integral_constant<int, 1> one;
    TileRange all = whole_words<Word>(Ranges(seen + row, rows).all);
    if (is_empty(all)) all = {kTileKeys, kTileKeys};
    for (int64_t r = row; r < row + rows; ++r)
      if (seen[r].first < all.first) call(r, one, seen[r].first, least(seen[r].last, all.first));
    if (!is_empty(all)) with_rows(rows, [&](auto constant) { call(row, constant, all.first, all.last); });
    for (int64_t r = row; r < row + rows; ++r)
      if (seen[r].last > all.last) call(r, one, most(seen[r].first, all.last), seen[r].last);
  });
}

template <typename Word, typename T>
void sum_in_place(Rows weights, int64_t num_rows, const TileRange* seen, const TileView<T>& tile, int64_t size,
                  Rows sums) {
  const T* const* next = tile.next_keys;
  for_seen<Word>(seen, num_rows, [&](int64_t row, auto constant, int64_t begin, int64_t end) {
    constexpr int kRows = constant.value;
    sum_columns<Word, kRows, num_columns(kRows)>(weights.from(row), tile.values, next, begin, end, 0, size,
                                                 sums.from(row));
    next = nullptr;
  });
}

template <typename Word, typename T>
void sum_by_panels(Rows weights, int64_t num_rows, const TileRange* seen, const TileView<T>& tile, int64_t size,
                   float* packed, Rows sums) {
  const TileRange any = Ranges(seen, num_rows).any;
  if (is_empty(any)) return;
  pack_values<Word>(tile.values, any.first, any.last, size, packed);
  Prefetch soon(tile.next_keys, size, num_steps(num_rows, size));
  for_seen<Word>(seen, num_rows, [&](int64_t row, auto constant, int64_t begin, int64_t end) {
    sum_packed<Word, constant.value>(weights.from(row), packed, begin, end, size, sums.from(row), soon);
  });
}

// Attends the rows of a run and of one KV head to the keys and values of a tile. Nothing but what a row sees enters its
// sums, so anything may be elsewhere.
template <typename Word, typename T>
void attend_head(const AttentionTask& task, const AttentionScratch& scratch, const SpanRun& run, int64_t head,
                 const TileView<T>& tile) {
  const AttentionLayer& layer = *task.layer;
  const TileRange* seen = scratch.seen;
  const int64_t row = head * task.num_rows + run.row, stride = sum_stride(task);
  const Rows queries{scratch.queries + row * padded(layer.key_size), padded(layer.key_size)};
  const Rows scores{scratch.scores, kTileKeys}, sums{scratch.part.sums + row * stride, stride};
  if (run.num_rows <= kMostRows) {
    score_few_rows<Word>(queries, run.num_rows, seen, layer.key_size, tile, scratch.turned, scores);
  } else {
    score_rows<Word>(queries, run.num_rows, seen, layer.key_size, tile, scratch.turned, scores);
  }
  const ScoreRule rule{in_log2(layer.scale), in_log2(layer.softcap)};
  soften_rows<Word>(scores, run.num_rows, seen, rule, scratch.part, row, stride, scratch.factors, scratch.totals);
  if (run.num_rows < kPackedRows)
    sum_in_place<Word>(scores, run.num_rows, seen, tile, layer.value_size, sums);
  else
    sum_by_panels<Word>(scores, run.num_rows, seen, tile, layer.value_size, scratch.packed, sums);
}

template <typename Word, typename T>
void attend_in_place(const AttentionTask& task, const AttentionScratch& scratch, const SpanRun& run,
                     const TileRows& rows, const TileRows& next_rows) {
  const AttentionLayer& layer = *task.layer;
  TileView<T> tile;
  for (int64_t head = 0; head < task.num_heads; ++head) {
    const bool is_last = head + 1 == task.num_heads;
    const TileRows& next = is_last ? next_rows : rows;
    find_head(rows.key, (task.first_head + head) * layer.key_head_stride, tile.keys);
    find_head(rows.value, (task.first_head + head) * layer.value_head_stride, tile.values);
    tile.first = rows.first, tile.last = rows.last;
    tile.next_values = tile.values, tile.next_keys = next.is_empty() ? nullptr : tile.next;
    if (tile.next_keys)
      find_head(next.key, (task.first_head + (is_last ? 0 : head + 1)) * layer.key_head_stride, tile.next);
    attend_head<Word>(task, scratch, run, head, tile);
  }
}

void attend_expanded(const AttentionTask& task, const AttentionScratch& scratch, const SpanRun& run,
                     const int32_t* table, const TileRows& rows, int64_t begin) {
  const AttentionLayer& layer = *task.layer;
  const Rows keys{scratch.keys, padded(layer.key_size)}, own_values{scratch.values, padded(layer.value_size)};
  const bool is_latent = layer.expanded_value == layer.expanded_key;
  const Rows values = is_latent ? keys : own_values;
  TileView<float> tile;
  tile.first = rows.first, tile.last = rows.last, tile.next_values = tile.next_keys = nullptr;
  for (int64_t j = 0; j < kTileKeys; ++j) {
    const int64_t valid = most(rows.first, least(j, rows.last - 1));
    tile.keys[j] = keys[valid], tile.values[j] = values[valid];
  }
  for (int64_t head = 0; head < task.num_heads; ++head) {
    expand_tile(layer, table, *layer.expanded_key, task.first_head + head, begin, rows, layer.key_size, keys,
                scratch.codes);
    if (!is_latent)
      expand_tile(layer, table, *layer.expanded_value, task.first_head + head, begin, rows, layer.value_size,
                  own_values, scratch.codes);
    attend_head<float>(task, scratch, run, head, tile);
  }
}

// What is attended after a run: a span, from the tile at `begin` on.
struct Following {
  const AttentionSpan* span;  // null: nothing
  int64_t begin;
};

// The keys that are read after those of the tile at `begin`, of which the last one is before `end`.
void find_next(const AttentionTask& task, const AttentionSpan& leader, int64_t begin, int64_t end,
               const Following& after, TileRows& next) {
  const int64_t own = begin + kTileKeys, own_end = least(end, leader.key_end);
  if (own < own_end || !after.span) return next.find(*task.layer, leader.table, own, own, own_end);
  next.find(*task.layer, after.span->table, after.begin, most(after.span->key_begin, task.key_begin),
            least(after.span->key_end, task.key_end));
}

void attend_tile(const AttentionTask& task, const AttentionScratch& scratch, const SpanRun& run, int64_t begin,
                 const Following& after) {
  const AttentionLayer& layer = *task.layer;
  const AttentionSpan* leader = &task.spans[run.first];  // the one whose keys begin first
  int64_t last = leader->key_end;
  for (int64_t s = run.first + 1; s < run.last; ++s) {
    if (task.spans[s].key_begin < leader->key_begin) leader = &task.spans[s];
    last = most(last, task.spans[s].key_end);
  }
  TileRows rows, next;
  const int64_t end = least(task.key_end, last);
  rows.find(layer, leader->table, begin, most(leader->key_begin, task.key_begin), end);
  if (rows.is_empty()) return;
  find_ranges(task, run, begin, rows.last, scratch.seen);
  if (layer.expanded_key) return attend_expanded(task, scratch, run, leader->table, rows, begin);
  find_next(task, *leader, begin, end, after, next);
  if constexpr (kHasPairs)
    if (multiplies_pairs(layer)) return attend_in_place<Pair, Bf16>(task, scratch, run, rows, next);
  switch (layer.cache_type) {
    case ElementType::kFloat32: return attend_in_place<float, float>(task, scratch, run, rows, next);
    case ElementType::kBfloat16: return attend_in_place<float, Bf16>(task, scratch, run, rows, next);
    case ElementType::kFloat16: return attend_in_place<float, Fp16>(task, scratch, run, rows, next);
  }
}

// Returns how many spans from the first of a run on attend to the tile together.
SpanRun first_together(const AttentionTask& task, const SpanRun& run, int64_t begin) {
  const int64_t group = task.layer->group_size;
  SpanRun part{run.first, run.first + 1, run.row, task.spans[run.first].num_queries * group};
  for (; part.last < run.last; ++part.last) {
    const AttentionSpan &a = task.spans[part.last - 1], &b = task.spans[part.last];
    if (!share_blocks(a, b, begin, begin + kTileKeys, task.layer->block_size)) break;
    part.num_rows += b.num_queries * group;
  }
  return part;
}

// Adds the part that ends to the task's state, and starts the next one.
void end_part(const AttentionTask& task, const AttentionScratch& scratch, const SpanRun& run) {
  for (int64_t head = 0; head < task.num_heads; ++head) {
    const int64_t row = head * task.num_rows + run.row;
    merge_rows(task.state, scratch.part, row, run.num_rows, sum_stride(task));
    start(scratch.part, row, run.num_rows, sum_stride(task));
  }
}

// Attends the spans of a run from the tile at `begin` on: together as long as they share blocks, then each branch of
// them to its end.
void attend_run(const AttentionTask& task, const AttentionScratch& scratch, const SpanRun& run, int64_t begin,
                const Following& after) {
  for (; begin < task.key_end; begin += kTileKeys) {
    const SpanRun part = first_together(task, run, begin);
    if (part.last < run.last) {
      attend_run(task, scratch, part, begin, {&task.spans[part.last], begin});
      const SpanRun rest{part.last, run.last, run.row + part.num_rows, run.num_rows - part.num_rows};
      return attend_run(task, scratch, rest, begin, after);
    }
    if (part.last == run.first + 1 && task.spans[run.first].key_end <= begin) break;
    attend_tile(task, scratch, run, begin, after);
    if ((begin + kTileKeys) % kPartKeys == 0) end_part(task, scratch, run);
  }
  end_part(task, scratch, run);
}

void attend(const AttentionTask& task, const AttentionScratch& scratch) {
  const int64_t num_rows = task.num_heads * task.num_rows;
  start(task.state, 0, num_rows, sum_stride(task));
  start(scratch.part, 0, num_rows, sum_stride(task));
  const Rows queries{scratch.queries, padded(task.layer->key_size)};
  switch (task.layer->query_type) {
    case ElementType::kFloat32: load_queries<float>(task, queries); break;
    case ElementType::kBfloat16: load_queries<Bf16>(task, queries); break;
    case ElementType::kFloat16: load_queries<Fp16>(task, queries); break;
  }
  attend_run(task, scratch, {0, task.num_spans, 0, task.num_rows}, task.key_begin / kTileKeys * kTileKeys,
             {nullptr, 0});
}

void merge(const AttentionTask& into, const AttentionState& from) {
  merge_rows(into.state, from, 0, into.num_heads * into.num_rows, sum_stride(into));
}

// One row of the state to its output.
template <typename T>
void finish_row(const AttentionTask& task, int64_t row, int64_t query_head, T* out) {
  const AttentionLayer& layer = *task.layer;
  float factor = 1.0f, weight = task.state.weights[row];
  if (layer.sinks) {  // one more logit, whose value is zero
    const float maximum = task.state.maxima[row], sink = layer.sinks[query_head] * kLog2E;
    const float top = sink > maximum ? sink : maximum;
    factor = weight_of(maximum, top);
    weight = weight * factor + std::exp2(sink - top);
  }
  const float* sums = task.state.sums + row * sum_stride(task);
  for (int64_t d = 0; d < layer.value_size; ++d) store_element(out + d, sums[d] * (factor / weight));
}

template <typename T>
void finish_typed(const AttentionTask& task) {
  const AttentionLayer& layer = *task.layer;
  int64_t row = 0;
  for (int64_t head = 0; head < task.num_heads; ++head)
    for (int64_t s = 0; s < task.num_spans; ++s)
      for (int64_t token = 0; token < task.spans[s].num_queries; ++token)
        for (int64_t member = 0; member < layer.group_size; ++member, ++row) {
          const int64_t query_head = (task.first_head + head) * layer.group_size + member;
          finish_row(task, row, query_head,
                     reinterpret_cast<T*>(task.spans[s].out + token * layer.out_token_stride +
                                          query_head * layer.out_head_stride));
        }
}

void finish(const AttentionTask& task) {
  switch (task.layer->query_type) {
    case ElementType::kFloat32: return finish_typed<float>(task);
    case ElementType::kBfloat16: return finish_typed<Bf16>(task);
    case ElementType::kFloat16: return finish_typed<Fp16>(task);
  }
}

}  // namespace

const AttentionKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, attend, merge, finish};

}  // namespace kvpage
