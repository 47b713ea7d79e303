// The body of AttentionKernel, compiled once for each instruction set (simd/kernel.cpp.in).
#include <limits>

#include "attention/attention_kernel.h"
#include "quantize/quantize_kernel.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

#if KVPAGE_REGISTER_BYTES == 64 || defined(__aarch64__)
constexpr int64_t kNumRegisters = 32;
#else
constexpr int64_t kNumRegisters = 16;
#endif
// The numbers that keep the sums in registers.
constexpr int64_t kDotRows = kNumRegisters / 8, kDotKeys = 4;
constexpr int64_t kSumRows = 4, kSumColumns = kNumRegisters / 8;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t padded(int64_t size) { return (size + kRowPadding - 1) / kRowPadding * kRowPadding; }

// Rows of fp32 in scratch.
struct Rows {
  float* data;
  int64_t stride;  // elements

  float* operator[](int64_t row) const { return data + row * stride; }
  Rows from(int64_t row) const { return {data + row * stride, stride}; }
};

// The rows of a tile that are read now, and rows that will be read next: while one element is worked on, the memory of
// its companion is fetched. Blocks are anywhere in memory, so the hardware cannot foresee them.
template <typename T>
struct Stream {
  const T* const* rows;
  const T* const* next;  // null: nothing to fetch

  Stream from(int64_t j) const { return {rows + j, next ? next + j : nullptr}; }
  Stream alone() const { return {rows, nullptr}; }
  const T* at(int64_t j, int64_t d) const {
    if (next) __builtin_prefetch(next[j] + d, 0, 2);
    return rows[j] + d;
  }
};

// --- scores: dot products of NumRows queries with NumKeys keys -----------------------------------------------------

template <int NumRows, int NumKeys, typename T>
inline void dot_tile(Rows queries, Stream<T> keys, int64_t size, Rows scores) {
  Vec sums[NumRows][NumKeys] = {};
  auto add = [&](int64_t d, auto load_key) {
    Vec key[NumKeys];
    for (int j = 0; j < NumKeys; ++j) key[j] = load_key(keys.at(j, d));
    for (int r = 0; r < NumRows; ++r) {
      const Vec query = load(queries[r] + d);
      for (int j = 0; j < NumKeys; ++j) sums[r][j] += query * key[j];
    }
  };
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) add(d, [](const T* key) { return load(key); });
  if (d < size) add(d, [&](const T* key) { return load_partial(key, size - d); });
  for (int r = 0; r < NumRows; ++r) {
    if constexpr (NumKeys == 4) {
      const Vec four = sum_lanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
      std::memcpy(scores[r], &four, 4 * sizeof(float));
    } else {
      *scores[r] = sum_lanes(sums[r][0]);
    }
  }
}

template <int NumRows, typename T>
inline void dot_rows(Rows queries, Stream<T> keys, int64_t num_keys, int64_t size, Rows scores) {
  int64_t j = 0;
  for (; j + kDotKeys <= num_keys; j += kDotKeys)
    dot_tile<NumRows, kDotKeys>(queries, keys.from(j), size, {scores.data + j, scores.stride});
  for (; j < num_keys; ++j) dot_tile<NumRows, 1>(queries, keys.from(j), size, {scores.data + j, scores.stride});
}

template <typename T>
inline void dot(Rows queries, int64_t num_rows, Stream<T> keys, int64_t num_keys, int64_t size, Rows scores) {
  int64_t r = 0;
  for (; r + kDotRows <= num_rows; r += kDotRows, keys = keys.alone())
    dot_rows<kDotRows>(queries.from(r), keys, num_keys, size, scores.from(r));
  for (; r < num_rows; ++r, keys = keys.alone()) dot_rows<1>(queries.from(r), keys, num_keys, size, scores.from(r));
}

// --- weights: the online softmax of one row ------------------------------------------------------------------------

// Turns `count` scores into weights relative to the row's new maximum. Returns the factor that takes sums
// under the old maximum to the new one.
inline float softmax_row(float* scores, int64_t count, float softcap, float& maximum, float& weight) {
  if (softcap > 0)
    for (int64_t j = 0; j < count; j += kLanes) store(scores + j, softcap * tanh(load(scores + j) / softcap));
  for (int64_t j = count; j % kLanes != 0; ++j) scores[j] = kLowest;
  Vec top = splat(maximum);
  for (int64_t j = 0; j < count; j += kLanes) top = max(top, load(scores + j));
  const float new_maximum = max_lanes(top);
  Vec total = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec weights = exp_negative(load(scores + j) - new_maximum);
    store(scores + j, weights);
    total += weights;
  }
  const float factor = maximum == new_maximum ? 1.0f : std::exp(maximum - new_maximum);
  maximum = new_maximum;
  weight = weight * factor + sum_lanes(total);
  return factor;
}

// --- sums: NumRows rows of weights times NumColumns vectors of each value ------------------------------------------

template <int NumRows, int NumColumns, typename LoadValue>
inline void sum_tile(Rows weights, int64_t num_keys, Rows sums, LoadValue load_value) {
  Vec total[NumRows][NumColumns];
  for (int r = 0; r < NumRows; ++r)
    for (int c = 0; c < NumColumns; ++c) total[r][c] = load(sums[r] + c * kLanes);
  for (int64_t j = 0; j < num_keys; ++j) {
    Vec value[NumColumns];
    for (int c = 0; c < NumColumns; ++c) value[c] = load_value(j, c);
    for (int r = 0; r < NumRows; ++r)
      for (int c = 0; c < NumColumns; ++c) total[r][c] += weights[r][j] * value[c];
  }
  for (int r = 0; r < NumRows; ++r)
    for (int c = 0; c < NumColumns; ++c) store(sums[r] + c * kLanes, total[r][c]);
}

template <int NumRows, typename T>
inline void sum_rows(Rows weights, Stream<T> values, int64_t num_keys, int64_t size, Rows sums) {
  int64_t d = 0;
  auto whole = [&](int64_t j, int c) { return load(values.at(j, d + c * kLanes)); };
  auto partial = [&](int64_t j, int) { return load_partial(values.at(j, d), size - d); };
  for (; d + kSumColumns * kLanes <= size; d += kSumColumns * kLanes)
    sum_tile<NumRows, kSumColumns>(weights, num_keys, {sums.data + d, sums.stride}, whole);
  for (; d + kLanes <= size; d += kLanes) sum_tile<NumRows, 1>(weights, num_keys, {sums.data + d, sums.stride}, whole);
  if (d < size) sum_tile<NumRows, 1>(weights, num_keys, {sums.data + d, sums.stride}, partial);
}

template <typename T>
inline void sum(Rows weights, int64_t num_rows, Stream<T> values, int64_t num_keys, int64_t size, Rows sums) {
  int64_t r = 0;
  for (; r + kSumRows <= num_rows; r += kSumRows, values = values.alone())
    sum_rows<kSumRows>(weights.from(r), values, num_keys, size, sums.from(r));
  for (; r < num_rows; ++r, values = values.alone()) sum_rows<1>(weights.from(r), values, num_keys, size, sums.from(r));
}

// --- a task --------------------------------------------------------------------------------------------------------

inline int64_t rows_per_head(const AttentionTask& task) { return task.num_queries * task.group_size; }

template <typename T>
void load_queries(const AttentionTask& task, Rows queries) {
  int64_t row = 0;
  for (int64_t head = 0; head < task.num_kv_heads; ++head)
    for (int64_t token = 0; token < task.num_queries; ++token)
      for (int64_t member = 0; member < task.group_size; ++member, ++row) {
        const int64_t query_head = head * task.group_size + member;
        const T* from = reinterpret_cast<const T*>(task.query + token * task.query_token_stride +
                                                   query_head * task.query_head_stride);
        for (int64_t d = 0; d < queries.stride; d += kLanes) {
          const int64_t count = most(0, least(kLanes, task.key_size - d));
          store(queries[row] + d, task.scale * (count ? load_partial(from + d, count) : Vec{}));
        }
      }
}

// The keys of [begin, end) that query `token` sees, counted from begin; none where first >= last.
struct Visible {
  int64_t first, last;
  bool operator==(const Visible& other) const { return first == other.first && last == other.last; }
};

inline Visible visible(const AttentionTask& task, int64_t token, int64_t begin, int64_t end) {
  const int64_t position = task.positions ? task.positions[token] : task.first_position + token;
  const int64_t first = position < task.window ? 0 : position - task.window + 1;
  return {most(first, begin) - begin, least(position + 1, end) - begin};
}

// Attends the rows of one KV head to the keys and values of one tile. Tokens that see the same part of it go together;
// nothing outside of that part enters their sums, so anything may be there.
template <typename T>
void attend_head(const AttentionTask& task, int64_t head, int64_t begin, int64_t end, Stream<T> keys, Stream<T> values,
                 Rows queries, Rows scores) {
  const int64_t row = head * rows_per_head(task);
  const Rows sums{task.state.sums, padded(task.value_size)};
  for (int64_t token = 0; token < task.num_queries;) {
    const Visible part = visible(task, token, begin, end);
    int64_t next = token + 1;
    while (next < task.num_queries && visible(task, next, begin, end) == part) ++next;
    const int64_t first_row = row + token * task.group_size, num_rows = (next - token) * task.group_size;
    const int64_t num_keys = part.last - part.first;
    token = next;
    if (num_keys <= 0) continue;
    dot(queries.from(first_row), num_rows, keys.from(part.first), num_keys, task.key_size, scores);
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t i = first_row + r;
      const float factor = softmax_row(scores[r], num_keys, task.softcap, task.state.maxima[i], task.state.weights[i]);
      if (factor != 1.0f)
        for (int64_t d = 0; d < sums.stride; d += kLanes) store(sums[i] + d, load(sums[i] + d) * factor);
    }
    sum(scores, num_rows, values.from(part.first), num_keys, task.value_size, sums.from(first_row));
  }
}

// The first KV head's row of each key and value of a tile.
struct TileRows {
  const std::byte *key[kTileKeys], *value[kTileKeys];

  void find(const AttentionTask& task, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block_id = task.table[i / task.block_size], offset = i % task.block_size;
      key[i - begin] = task.key + block_id * task.key_block_stride + offset * task.key_token_stride;
      value[i - begin] = task.value + block_id * task.value_block_stride + offset * task.value_token_stride;
    }
  }
};

template <typename T>
inline void find_head(const std::byte* const* rows, int64_t offset, const T** head_rows) {
  for (int64_t j = 0; j < kTileKeys; ++j) head_rows[j] = reinterpret_cast<const T*>(rows[j] + offset);
}

template <typename T>
void attend_typed(const AttentionTask& task, Rows queries, Rows scores) {
  TileRows tiles[2] = {};
  const T *keys[kTileKeys], *values[kTileKeys], *next_keys[kTileKeys];
  tiles[0].find(task, task.key_begin, least(task.key_begin + kTileKeys, task.key_end));
  for (int64_t begin = task.key_begin, tile = 0; begin < task.key_end; begin += kTileKeys, tile ^= 1) {
    const int64_t end = least(begin + kTileKeys, task.key_end);
    tiles[tile ^ 1].find(task, end, least(end + kTileKeys, task.key_end));
    for (int64_t head = 0; head < task.num_kv_heads; ++head) {
      find_head(tiles[tile].key, head * task.key_head_stride, keys);
      find_head(tiles[tile].value, head * task.value_head_stride, values);
      const bool last = head + 1 == task.num_kv_heads;
      find_head(tiles[tile ^ last].key, last ? 0 : (head + 1) * task.key_head_stride, next_keys);
      attend_head<T>(task, head, begin, end, {keys, values}, {values, next_keys}, queries, scores);
    }
  }
}

template <typename T>
void widen(const T* from, int64_t size, float* to) {
  for (int64_t d = 0; d < size; d += kLanes) {
    const int64_t count = least(kLanes, size - d);
    const Vec values = count == kLanes ? load(from + d) : load_partial(from + d, count);
    std::memcpy(to + d, &values, static_cast<size_t>(count) * sizeof(float));
  }
}

void widen(RowType type, const std::byte* from, int64_t size, float* to) {
  switch (type) {
    case RowType::kBfloat16: return widen(reinterpret_cast<const Bf16*>(from), size, to);
    case RowType::kFloat16: return widen(reinterpret_cast<const Fp16*>(from), size, to);
    default: return widen(reinterpret_cast<const float*>(from), size, to);
  }
}

// One head of the tokens [begin, end) in fp32, in rows of `out`, block by block.
void expand_tile(const AttentionTask& task, const TileSource& source, int64_t head, int64_t begin, int64_t end,
                 int64_t size, Rows out, std::byte* codes) {
  const KVPart& part = source.part;
  const int64_t row_bytes = size * part.element_bytes;
  for (int64_t token = begin; token < end;) {
    const int64_t block_id = task.table[token / task.block_size], offset = token % task.block_size;
    const int64_t count = least(end - token, task.block_size - offset);
    const std::byte* rows = part.at(block_id, offset, head);
    int64_t stride = part.token_stride;
    if (part.run_size < size) {
      collect_tokens(part, rows, count, size, codes, row_bytes, {});
      rows = codes, stride = row_bytes;
    }
    for (int64_t i = 0; i < count; ++i) {
      float* to = out[token - begin + i];
      if (source.code_type == CodeType::kBits) {
        widen(source.type, rows + i * stride, size, to);
        continue;
      }
      const bool own_scale = source.code_type == CodeType::kInt8;
      const float scale = own_scale ? *part.scale_at(block_id, offset + i, head) : source.scale(head);
      best_quantize_kernel().decode(source.code_type, RowType::kFloat32, rows + i * stride, size, scale,
                                    reinterpret_cast<std::byte*>(to), false);
    }
    token += count;
  }
}

void attend_expanded(const AttentionTask& task, const AttentionScratch& scratch, Rows queries, Rows scores) {
  const Rows keys{scratch.keys, padded(task.key_size)}, own_values{scratch.values, padded(task.value_size)};
  const bool is_latent = task.expanded_value == task.expanded_key;
  const Rows values = is_latent ? keys : own_values;
  const float *key_rows[kTileKeys] = {}, *value_rows[kTileKeys] = {};
  for (int64_t j = 0; j < kTileKeys; ++j) key_rows[j] = keys[j], value_rows[j] = values[j];
  for (int64_t begin = task.key_begin; begin < task.key_end; begin += kTileKeys) {
    const int64_t end = least(begin + kTileKeys, task.key_end);
    for (int64_t head = 0; head < task.num_kv_heads; ++head) {
      expand_tile(task, *task.expanded_key, task.first_head + head, begin, end, task.key_size, keys, scratch.codes);
      if (!is_latent)
        expand_tile(task, *task.expanded_value, task.first_head + head, begin, end, task.value_size, own_values,
                    scratch.codes);
      attend_head<float>(task, head, begin, end, {key_rows, nullptr}, {value_rows, nullptr}, queries, scores);
    }
  }
}

void attend(const AttentionTask& task, const AttentionScratch& scratch) {
  const int64_t num_rows = task.num_kv_heads * rows_per_head(task);
  const Rows queries{scratch.queries, padded(task.key_size)}, scores{scratch.scores, kTileKeys};
  for (int64_t i = 0; i < num_rows * padded(task.value_size); ++i) task.state.sums[i] = 0;
  for (int64_t i = 0; i < num_rows; ++i) task.state.weights[i] = 0, task.state.maxima[i] = kLowest;
  switch (task.query_type) {
    case ElementType::kFloat32: load_queries<float>(task, queries); break;
    case ElementType::kBfloat16: load_queries<Bf16>(task, queries); break;
    case ElementType::kFloat16: load_queries<Fp16>(task, queries); break;
  }
  if (task.expanded_key) return attend_expanded(task, scratch, queries, scores);
  switch (task.cache_type) {
    case ElementType::kFloat32: return attend_typed<float>(task, queries, scores);
    case ElementType::kBfloat16: return attend_typed<Bf16>(task, queries, scores);
    case ElementType::kFloat16: return attend_typed<Fp16>(task, queries, scores);
  }
}

// exp(maximum - top), 0 for a row that has seen no key, also when no row has.
inline float weight_of(float maximum, float top) { return maximum == kLowest ? 0.0f : std::exp(maximum - top); }

void merge(const AttentionTask& into, const AttentionState& from) {
  const int64_t num_rows = into.num_kv_heads * rows_per_head(into), stride = padded(into.value_size);
  for (int64_t i = 0; i < num_rows; ++i) {
    const AttentionState& to = into.state;
    const float top = from.maxima[i] > to.maxima[i] ? from.maxima[i] : to.maxima[i];
    const float mine = weight_of(to.maxima[i], top), theirs = weight_of(from.maxima[i], top);
    float* sums = to.sums + i * stride;
    for (int64_t d = 0; d < stride; ++d) sums[d] = sums[d] * mine + from.sums[i * stride + d] * theirs;
    to.weights[i] = to.weights[i] * mine + from.weights[i] * theirs;
    to.maxima[i] = top;
  }
}

template <typename T>
void finish_typed(const AttentionTask& task) {
  const int64_t stride = padded(task.value_size);
  int64_t row = 0;
  for (int64_t head = 0; head < task.num_kv_heads; ++head)
    for (int64_t token = 0; token < task.num_queries; ++token)
      for (int64_t member = 0; member < task.group_size; ++member, ++row) {
        const int64_t query_head = head * task.group_size + member;
        float factor = 1.0f, weight = task.state.weights[row];
        if (task.sinks) {  // one more logit, whose value is zero
          const float maximum = task.state.maxima[row], sink = task.sinks[query_head];
          const float top = sink > maximum ? sink : maximum;
          factor = weight_of(maximum, top);
          weight = weight * factor + std::exp(sink - top);
        }
        T* out = reinterpret_cast<T*>(task.out + token * task.out_token_stride + query_head * task.out_head_stride);
        const float* sums = task.state.sums + row * stride;
        for (int64_t d = 0; d < task.value_size; ++d) store_element(out + d, sums[d] * (factor / weight));
      }
}

void finish(const AttentionTask& task) {
  switch (task.query_type) {
    case ElementType::kFloat32: return finish_typed<float>(task);
    case ElementType::kBfloat16: return finish_typed<Bf16>(task);
    case ElementType::kFloat16: return finish_typed<Fp16>(task);
  }
}

}  // namespace

const AttentionKernel KVPAGE_KERNEL = {KVPAGE_INSTRUCTION_SET, attend, merge, finish};

}  // namespace kvpage
