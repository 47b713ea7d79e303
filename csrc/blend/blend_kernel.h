// BlendKernel: what blending does to a token's K or V. A rotary embedding turns pairs (x, y) of a head's numbers:
//
//   x' = x cos - y sin        pairs    neox          (0, n), (1, n + 1) ...   n = num_pairs
//   y' = y cos + x sin                 interleaved   (0, 1), (2, 3) ...       from `first` on
//
// All in fp32, each product and each sum rounded by itself, as kvpage.ops.reference has it, and bit for bit the same. One
// source is compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/row_codec.h"

namespace kvpage {

// What is turned in each head; the rest of it is copied.
struct TurnShape {
  int64_t first, num_pairs;
  bool is_interleaved;
};

// A token's heads, so many bytes from one to the next.
struct Heads {
  std::byte* first;
  int64_t stride;

  std::byte* head(int64_t i) const { return first + i * stride; }
};

struct BlendKernel {
  const char* name;
  // `to` may be `from`, else they share no memory. cos, sin: [num_pairs], of the token. `streaming`: whole vectors are
  // stored past the processor's cache where they can be; the caller fences.
  void (*turn)(RowType type, Heads from, Heads to, int64_t num_heads, int64_t head_size, const TurnShape& shape,
               const float* cos, const float* sin, bool streaming);
  // The sum of the squared differences of `size` numbers.
  float (*squared_difference)(RowType type, const std::byte* a, const std::byte* b, int64_t size);
};

// The best for this machine; or the one of that name, for tests (InvalidArgument if this machine lacks it).
const BlendKernel& blend_kernel();
const BlendKernel& blend_kernel(const char* name);

extern const BlendKernel blend_kernel_base;
#if defined(__x86_64__)
extern const BlendKernel blend_kernel_avx2, blend_kernel_avx512;
#endif

}  // namespace kvpage
