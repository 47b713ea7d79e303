// Where the keys and values of a tile are: in place, block by block, or expanded to fp32 in scratch. For the body of
// AttentionKernel, compiled once for each instruction set.
#pragma once

#include "attention/attention_kernel.h"
#include "attention/tile_products_impl.h"
#include "quantize/quantize_kernel.h"
#include "simd/vectors.h"

namespace kvpage {
namespace {

// The cache's first head of each key and value of a tile: of [first, last), and around it those of the nearest one, so
// that a whole tile can be read.
struct TileRows {
  const std::byte *key[kTileKeys], *value[kTileKeys];
  int64_t first = 0, last = 0;

  bool is_empty() const { return first >= last; }

  // Finds the keys from `from` to `end` in the tile that begins at `begin`.
  void find(const AttentionLayer& layer, const int32_t* table, int64_t begin, int64_t from, int64_t end) {
    first = most(from - begin, 0), last = least(end - begin, kTileKeys);
    for (int64_t j = first; j < last; ++j) {
      const int64_t block_id = table[(begin + j) / layer.block_size], offset = (begin + j) % layer.block_size;
      key[j] = layer.key + block_id * layer.key_block_stride + offset * layer.key_token_stride;
      value[j] = layer.value + block_id * layer.value_block_stride + offset * layer.value_token_stride;
    }
    if (is_empty()) return;
    for (int64_t j = 0; j < first; ++j) key[j] = key[first], value[j] = value[first];
    for (int64_t j = last; j < kTileKeys; ++j) key[j] = key[last - 1], value[j] = value[last - 1];
  }
};

// One KV head of a tile. What is read soon is fetched: `next_values` while the keys are turned, `next_keys` while the
// values are read; null: nothing.
template <typename T>
struct TileView {
  const T *keys[kTileKeys], *values[kTileKeys], *next[kTileKeys];
  const T *const *next_values, *const *next_keys;
  int64_t first, last;  // keys that are there
};

template <typename T>
inline void find_head(const std::byte* const* rows, int64_t offset, const T** head_rows) {
  for (int64_t j = 0; j < kTileKeys; ++j) head_rows[j] = reinterpret_cast<const T*>(rows[j] + offset);
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

// One head of the tile that begins at `begin`, in fp32, in rows of `out`, block by block.
void expand_tile(const AttentionLayer& layer, const int32_t* table, const TileSource& source, int64_t head,
                 int64_t begin, const TileRows& rows_of_tile, int64_t size, Rows out, std::byte* codes) {
  const KVPart& part = source.part;
  const int64_t row_bytes = size * part.element_bytes, end = begin + rows_of_tile.last;
  for (int64_t token = begin + rows_of_tile.first; token < end;) {
    const int64_t block_id = table[token / layer.block_size], offset = token % layer.block_size;
    const int64_t count = least(end - token, layer.block_size - offset);
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

}  // namespace
}  // namespace kvpage
