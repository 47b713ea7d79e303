#include "tokens/kv_part.h"

#include <algorithm>
#include <cstring>

#include "base/copy_bytes.h"
#include "base/prefetch.h"
#include "simd/transpose_kernel.h"

namespace kvpage {
namespace {

// Runs of a few bytes, those of a block's tokens side by side, are a matrix of runs and tokens; rows are the same with
// tokens and runs. So it is in the backend "paged", of K with runs of 16 bytes, and of V with runs of one element.
bool is_matrix(const KVPart& part, int64_t size) {
  const int64_t run_bytes = part.run_size * part.element_bytes;
  return part.token_stride == run_bytes && can_transpose(run_bytes) && size % part.run_size == 0;
}

// copy(cache, row, bytes) for each run of each token.
template <typename Copy>
void for_each_run(const KVPart& part, int64_t count, int64_t size, int64_t row_stride, const Copy& copy) {
  const int64_t run_bytes = part.run_size * part.element_bytes, row_bytes = size * part.element_bytes;
  for (int64_t begin = 0, run = 0; begin < row_bytes; begin += run_bytes, ++run)
    for (int64_t token = 0; token < count; ++token)
      copy(token * part.token_stride + run * part.run_stride, token * row_stride + begin,
           static_cast<size_t>(std::min(run_bytes, row_bytes - begin)));
}

void collect(const KVPart& part, const std::byte* place, int64_t count, int64_t size, std::byte* out,
             int64_t out_stride) {
  if (is_matrix(part, size))
    return transpose(part.token_stride, {out, out_stride, place, part.run_stride, size / part.run_size, count});
  for_each_run(part, count, size, out_stride, [&](int64_t in_cache, int64_t in_row, size_t bytes) {
    std::memcpy(out + in_row, place + in_cache, bytes);
  });
}

void scatter(const KVPart& part, std::byte* place, int64_t count, int64_t size, const std::byte* in,
             int64_t in_stride) {
  if (is_matrix(part, size))
    return transpose(part.token_stride, {place, part.run_stride, in, in_stride, count, size / part.run_size});
  for_each_run(part, count, size, in_stride, [&](int64_t in_cache, int64_t in_row, size_t bytes) {
    std::memcpy(place + in_cache, in + in_row, bytes);
  });
}

// --- by way of the first-level cache -------------------------------------------------------------------------------
//
// Writes past the cache have to be whole lines, one after the other. So a tile is transposed in the first-level cache
// and copied from there. Blocks come in any order, and reading them waits for memory. So each tile fetches as many
// bytes of the next block: a few lines at a time, since many at once have to wait.
//
//   collect     cache ── runs ──► tile: rows, a line more than their length apart ── each row ──► out
//   scatter     in ── rows ──► tile: in the cache's order ── one run ──► cache
//
// A tile is all tokens' elements [d, d + num): one dense run of a block that is written as a whole.

constexpr int64_t kLine = 64, kTileBytes = 2 << 10, kMostTokens = 256;
// At least a line of each token; and the lines between rows, for without them rows would share few sets of the cache.
constexpr int64_t kBufferBytes = std::max(kTileBytes, kMostTokens* kLine) + kMostTokens * kLine;

struct Tile {
  alignas(kLine) std::byte bytes[kBufferBytes];
};

// body(first element, number of elements) of each tile.
template <typename Body>
void for_each_tile(const KVPart& part, int64_t count, int64_t size, const std::byte* next, const Body& body) {
  const int64_t row_bytes = std::max(kLine, kTileBytes / count / kLine * kLine);
  const int64_t at_once = row_bytes / part.element_bytes;
  for (int64_t first = 0; first < size; first += at_once) {
    const int64_t num = std::min(at_once, size - first);
    if (next) prefetch(next + count * first * part.element_bytes, count * num * part.element_bytes);
    body(first, num);
  }
}

}  // namespace

void collect_tokens(const KVPart& part, const std::byte* place, int64_t count, int64_t size, std::byte* out,
                    int64_t out_stride, const Streaming& streaming) {
  if (!streaming.past_cache || count > kMostTokens || !is_matrix(part, size))
    return collect(part, place, count, size, out, out_stride);
  Tile tile;
  for_each_tile(part, count, size, streaming.next, [&](int64_t first, int64_t num) {
    const int64_t bytes = num * part.element_bytes, stride = (bytes + kLine - 1) / kLine * kLine + kLine;
    collect(part, place + first / part.run_size * part.run_stride, count, num, tile.bytes, stride);
    for (int64_t token = 0; token < count; ++token)
      copy_bytes(out + token * out_stride + first * part.element_bytes, tile.bytes + token * stride, bytes, true);
  });
}

void scatter_tokens(const KVPart& part, std::byte* place, int64_t count, int64_t size, const std::byte* in,
                    int64_t in_stride, const Streaming& streaming) {
  const bool fills_runs = is_matrix(part, size) && part.run_stride == count * part.token_stride;
  if (!streaming.past_cache || count > kMostTokens || !fills_runs)
    return scatter(part, place, count, size, in, in_stride);
  if (!streaming.next &&
      transpose_past_cache(part.token_stride, {place, part.run_stride, in, in_stride, count, size / part.run_size}))
    return;
  Tile tile;
  for_each_tile(part, count, size, streaming.next, [&](int64_t first, int64_t num) {
    scatter(part, tile.bytes, count, num, in + first * part.element_bytes, in_stride);
    copy_bytes(place + first / part.run_size * part.run_stride, tile.bytes, count * num * part.element_bytes, true);
  });
}

}  // namespace kvpage
