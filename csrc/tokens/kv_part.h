// KVPart: K or V of one layer, as the operations on tokens reach it. Owns nothing.
//
//   element d of a head of a token:   data + block_id * block_stride + offset * token_stride + head * head_stride
//                                          + (d / run_size) * run_stride + (d % run_size) * element_bytes
//
//   flash, flashinfer, mla   one run: run_size >= the head's size
//   paged, K                 runs of 16 bytes        paged, V    runs of one element
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpage {

struct KVPart {
  std::byte* data;
  int64_t block_stride, token_stride, head_stride, run_stride;  // bytes
  int64_t run_size;                                             // elements
  int64_t element_bytes;
  std::byte* scales;  // fp32 a token and head, or null
  int64_t scale_block_stride, scale_token_stride, scale_head_stride;

  std::byte* at(int64_t block_id, int64_t offset, int64_t head) const {
    return data + block_id * block_stride + offset * token_stride + head * head_stride;
  }
  float* scale_at(int64_t block_id, int64_t offset, int64_t head) const {
    return reinterpret_cast<float*>(scales + block_id * scale_block_stride + offset * scale_token_stride +
                                    head * scale_head_stride);
  }
};

// How tokens pass the processor's cache. `past_cache`: dense writes go past it, and the caller fences. `next`: as many
// bytes as are moved, which are read soon after and fetched meanwhile; or null.
struct Streaming {
  bool past_cache = false;
  const std::byte* next = nullptr;
};

// Copy the first `size` elements of one head of `count` tokens that follow each other in a block: to rows of
// `out_stride` bytes, or from such rows. The first token is at `place` (KVPart::at). The rest of each head in the cache
// stays.
void collect_tokens(const KVPart& part, const std::byte* place, int64_t count, int64_t size, std::byte* out,
                    int64_t out_stride, const Streaming& streaming);
void scatter_tokens(const KVPart& part, std::byte* place, int64_t count, int64_t size, const std::byte* in,
                    int64_t in_stride, const Streaming& streaming);

}  // namespace kvpage
