// BlendKernel: the arithmetic of blending on a token's K or V. A rotary embedding rotates pairs (x, y) of a head:
//
//   x' = x cos - y sin        pairs    neox          (0, n), (1, n + 1) ...   n = num_pairs
//   y' = y cos + x sin                 interleaved   (0, 1), (2, 3) ...       from `first` on
//
// It computes in fp32, each product and each sum rounded by itself, and equals kvpage.ops.reference bit for bit. One
// source is compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "simd/kernel_family.h"

namespace kvpage {

// The rotated part of each head; the rest is copied.
struct RotatedShape {
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
  void (*rotate)(RowType type, Heads from, Heads to, int64_t num_heads, int64_t head_size, const RotatedShape& shape,
                 const float* cos, const float* sin, bool streaming);
  // The sum of the squared differences of `size` numbers.
  float (*squared_difference)(RowType type, const std::byte* a, const std::byte* b, int64_t size);
};

const KernelFamily<BlendKernel>& blend_kernels();

KVPAGE_DECLARE_KERNELS(BlendKernel, blend_kernel);

}  // namespace kvpage
