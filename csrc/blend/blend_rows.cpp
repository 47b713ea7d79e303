#include "blend/blend_rows.h"

#include "base/check.h"
#include "base/copy_bytes.h"
#include "base/parallel.h"

namespace kvpage {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // a thread: starting one costs as much as copying a fifth of it
// A call mixes K or V of one of many layers. From so many bytes on, writing past the cache took 0.6 of the time of
// copying through it, though the bytes would have fitted.
constexpr int64_t kStreamingBytes = 4 << 20;

void check_slots(const char* name, const RowPlace& place, int64_t num_rows, int64_t least) {
  if (!place.slots) return;
  const int64_t num_slots = place.num_blocks * place.block_size;
  for (int64_t i = 0; i < num_rows; ++i)
    check(place.slots[i] >= least && place.slots[i] < num_slots, name, "[", i, "] must be in [", least, ", ", num_slots,
          "), got ", place.slots[i]);
}

void check_fresh_rows(const MixRows& args) {
  if (!args.fresh_rows) return;
  for (int64_t i = 0; i < args.num_rows; ++i)
    check(args.fresh_rows[i] >= -1 && args.fresh_rows[i] < args.num_fresh, "fresh_rows[", i, "] must be in [-1, ",
          args.num_fresh, "), got ", args.fresh_rows[i]);
}

void copy_heads(Heads from, Heads to, int64_t num_heads, int64_t head_bytes, bool streaming) {
  if (from.first == to.first) return;
  if (from.stride == head_bytes && to.stride == head_bytes)
    return copy_bytes(to.first, from.first, num_heads * head_bytes, streaming);
  for (int64_t h = 0; h < num_heads; ++h) copy_bytes(to.head(h), from.head(h), head_bytes, streaming);
}

void mix_row(const MixRows& args, int64_t i, bool streaming) {
  const int64_t head_bytes = args.size * row_element_bytes(args.type, 0);
  const Heads to = args.to.row(i);
  if (args.fresh_rows && args.fresh_rows[i] >= 0)
    return copy_heads(args.fresh.row(args.fresh_rows[i]), to, args.num_heads, head_bytes, streaming);
  const Heads from = args.from.row(i);
  if (!args.cos) return copy_heads(from, to, args.num_heads, head_bytes, streaming);
  const int64_t at = i * args.rotated.num_pairs;
  args.kernel->rotate(args.type, from, to, args.num_heads, args.size, args.rotated, args.cos + at, args.sin + at,
                      streaming);
}

}  // namespace

void mix_rows(const MixRows& args) {
  check_slots("slots", args.from, args.num_rows, 0);
  check_slots("out_slots", args.to, args.num_rows, -1);
  check_fresh_rows(args);
  const int64_t num_bytes = args.num_rows * args.num_heads * args.size * row_element_bytes(args.type, 0);
  // Rows that are rotated where they are have just come into the cache: past it each would be written on its own.
  const bool is_in_place = args.from.base == args.to.base;
  const bool streaming = streaming_threshold() < INT64_MAX && num_bytes >= kStreamingBytes && !is_in_place;
  parallel_for(args.num_rows, useful_threads(num_bytes, kGrainBytes, args.max_threads),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   if (!args.to.slots || args.to.slots[i] >= 0) mix_row(args, i, streaming);
                 if (streaming) end_streaming();
               });
}

void row_deviation(const RowDeviation& args) {
  const int64_t num_bytes = args.num_rows * args.num_heads * args.size * row_element_bytes(args.type, 0);
  const float count = static_cast<float>(args.num_heads * args.size);
  parallel_for(args.num_rows, useful_threads(num_bytes, kGrainBytes, args.max_threads),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   float sum = 0;
                   const Heads a = args.a.row(i), b = args.b.row(i);
                   for (int64_t h = 0; args.valid[i] && h < args.num_heads; ++h)
                     sum += args.kernel->squared_difference(args.type, a.head(h), b.head(h), args.size);
                   args.out[i] = sum / count;
                 }
               });
}

}  // namespace kvpage
