// AttentionKernel: the arithmetic of attention over blocks. One thread computes a task by itself.
//
// A span is some neighbouring queries of one sequence. A task attends the query rows of its spans, of some KV heads, to
// the keys [key_begin, key_end) of their sequences, tile by tile. Spans whose tables name the same blocks in a tile
// attend to it together: its keys and values are read once, and products are made for many rows at a time.
//
//   rows    KV head 0: span 0: query 0: members 0..g-1, query 1: ...     (g = query heads that share a KV head)
//                      span 1: ...
//           KV head 1: ...
//   keys    0        512       1024     position in the sequence
//           |--------|---------|----    a part starts a softmax of its own; parts are merged in their order
//           |-|-|-|-|-|-|-|-|-|-|-|-    a tile ends where the position is a multiple of kTileKeys
//
// The sums of a row are made in an order that its own position and window decide. So a row has the same bits whatever
// else is in the batch, however tasks are cut, and with any number of threads. What holds this up:
//
//   - tiles and parts begin at multiples of their sizes, wherever a row's first key is
//   - a score is a sum over the head's elements in their order, a sum of values one over the keys in their order; the
//     shape of a tile of registers decides only which rows and columns are computed at once
//   - a row's maximum and total are those of its own keys; every other lane adds a zero
//
// The same source is compiled once per instruction set (attention_kernel_impl.h); nothing in it may be an inline
// function with external linkage, or the linker could hand the wrong machine's copy to everyone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "simd/kernel_family.h"
#include "tokens/kv_part.h"

namespace kvpage {

enum class ElementType { kFloat32, kBfloat16, kFloat16 };

// Keys of a tile, and of a part. Each tile is taken for all heads before the next, so that memory is read nearly in
// order.
constexpr int64_t kTileKeys = 128, kPartKeys = 512;
// Rows in scratch are padded to a multiple of this, whatever the width of a vector.
constexpr int64_t kRowPadding = 16;

// K or V of a layer, whose tiles become fp32.
struct TileSource {
  KVPart part;
  CodeType code_type;
  RowType type;  // of the elements, where the code type is kBits
  const float* head_scales;
  int64_t head_scale_stride;

  float scale(int64_t head) const { return head_scales ? head_scales[head * head_scale_stride] : 1.0f; }
};

// The sums so far of each row, of the softmax's online form.
struct AttentionState {
  float* sums;  // [num_rows, value_size padded]: the weighted sum of values
  float* weights;  // [num_rows]
  float* maxima;  // [num_rows]; -inf before any key
};

// Keys of a tile, counted from its first; none where first >= last.
struct TileRange {
  int32_t first, last;
};

struct AttentionScratch {
  AttentionState part;  // of the part that is attended now
  float* queries;  // [num_rows, key_size padded]
  float* scores;  // [rows of a KV head, kTileKeys]
  float *factors, *totals;  // [rows of a KV head]
  TileRange* seen;  // [rows of a KV head]: the keys of a tile that a row sees
  float* turned;  // [key_size, kTileKeys]: a KV head's keys of a tile, key beside key
  float* packed;  // [kTileKeys, value_size padded]: its values, columns of a tile of registers together
  float* keys;  // where tiles are expanded: [kTileKeys, key_size padded], one KV head's
  float* values;  // [kTileKeys, value_size padded]
  std::byte* codes;  // [kTileKeys, the larger size] elements of the cache
};

// All tasks of a call have the same layer. Strides are in bytes.
struct AttentionLayer {
  const std::byte *key, *value;  // of the cache: its first token and head
  ElementType query_type, cache_type;  // of query and out; of key and value
  int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;
  int64_t key_block_stride, key_token_stride, key_head_stride;
  int64_t value_block_stride, value_token_stride, value_head_stride;
  int64_t block_size, group_size, key_size, value_size;
  int64_t window;  // keys that a query sees, its own included
  float scale, softcap;  // softcap 0: none
  const float* sinks;  // [num_kv_heads * group_size] or null

  // Where heads are not one run of fp32, bf16 or fp16, one KV head's keys and values of a tile are expanded to fp32.
  const TileSource *expanded_key, *expanded_value;  // null: read in place; the same for latents
};

struct AttentionSpan {
  const std::byte* query;  // of its first token and head 0
  std::byte* out;
  const int32_t* table;  // block ids of the sequence
  int64_t num_queries;
  int64_t first_position;  // of query 0 in the sequence; query j sees keys up to first_position + j
  const int64_t* positions;  // of each query, ascending, in place of first_position + j; or null
  int64_t key_begin, key_end;  // the keys that any of its queries sees
};

struct AttentionTask {
  const AttentionLayer* layer;
  const AttentionSpan* spans;
  int64_t num_spans, num_rows;  // rows of a KV head
  int64_t first_head, num_heads;  // KV heads
  int64_t key_begin, key_end;  // one part, or all of them
  AttentionState state;
};

struct AttentionKernel {
  const char* name;
  void (*attend)(const AttentionTask& task, const AttentionScratch& scratch);  // starts and fills task.state
  void (*merge)(const AttentionTask& into, const AttentionState& from);  // adds the state of the next part
  void (*finish)(const AttentionTask& task);  // task.state to the spans' outputs
};

const KernelFamily<AttentionKernel>& attention_kernels();

// Returns whether two spans read the same keys and values in the whole of [begin, end).
static inline bool share_blocks(const AttentionSpan& a, const AttentionSpan& b, int64_t begin, int64_t end,
                                int64_t block_size) {
  if (end > a.key_end || end > b.key_end) return false;
  if (a.table == b.table) return true;
  for (int64_t i = begin / block_size; i <= (end - 1) / block_size; ++i)
    if (a.table[i] != b.table[i]) return false;
  return true;
}

KVPAGE_DECLARE_KERNELS(AttentionKernel, attention_kernel);
#if defined(__x86_64__)
extern const AttentionKernel attention_kernel_avx512bf16;
#endif
extern const AttentionKernel attention_kernel_pairs_model;  // for tests: avx512bf16's loops in plain C++

}  // namespace kvpage
