// AttentionKernel: the arithmetic of attention over blocks. One thread computes a task by itself.
//
// A task attends the query rows of some KV heads of one sequence to the keys [key_begin, key_end) of that sequence:
//
//   rows    KV head 0: query 0: members 0..g-1, query 1: ...      (g = query heads that share a KV head)
//           KV head 1: ...
//   state   a row each of `sums` (the weighted sum of values so far), `weights` and `maxima` (of the softmax's online
//           form); states of tasks over other keys of the same rows merge into one, and finishing one writes the output
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

// Keys are taken in tiles of so many, each for all heads before the next, so that memory is read nearly in order.
constexpr int64_t kTileKeys = 32;
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

struct AttentionState {
  float* sums;  // [num_rows, value_size padded]
  float* weights;  // [num_rows]
  float* maxima;  // [num_rows]; -inf before any key
};

struct AttentionScratch {
  float* queries;  // [num_rows, key_size padded]
  float* scores;  // [rows of a KV head, kTileKeys]
  float* keys;  // of a task that expands tiles: [kTileKeys, key_size padded], one KV head's
  float* values;  // [kTileKeys, value_size padded]
  std::byte* codes;  // [kTileKeys, the larger size] elements of the cache
};

// Strides are in bytes; addresses are those of the task's first token and first head.
struct AttentionTask {
  const std::byte *query, *key, *value;
  std::byte* out;
  ElementType query_type, cache_type;  // of query and out; of key and value
  int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;
  int64_t key_block_stride, key_token_stride, key_head_stride;
  int64_t value_block_stride, value_token_stride, value_head_stride;
  const int32_t* table;  // block ids of the sequence
  int64_t block_size;
  int64_t num_kv_heads, num_queries, group_size, key_size, value_size;
  int64_t key_begin, key_end;
  int64_t first_position;  // of query 0 in the sequence; query j sees keys up to first_position + j
  const int64_t* positions;  // of each query, ascending, in place of first_position + j; or null
  int64_t window;  // and only so many of the last ones, its own included
  float scale, softcap;  // softcap 0: none
  const float* sinks;  // [num_kv_heads * group_size] or null
  AttentionState state;

  // Where heads are not one run of fp32, bf16 or fp16, one KV head's keys and values of a tile are expanded to fp32.
  const TileSource *expanded_key, *expanded_value;  // null: read in place; the same for latents
  int64_t first_head;  // KV head of the cache that is the task's first
};

struct AttentionKernel {
  const char* name;
  void (*attend)(const AttentionTask& task, const AttentionScratch& scratch);  // starts and fills task.state
  void (*merge)(const AttentionTask& into, const AttentionState& from);  // `from` is left undefined
  void (*finish)(const AttentionTask& task);  // task.state to task.out
};

const KernelFamily<AttentionKernel>& attention_kernels();

KVPAGE_DECLARE_KERNELS(AttentionKernel, attention_kernel);

}  // namespace kvpage
