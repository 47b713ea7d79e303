// NormKernel: the root mean square norm of rows, as models compute it.
//
//   h = x + residual, rounded to the dtype       (or x alone)
//   out = h / sqrt(mean(h**2) + eps) * (weight + offset)
//
// It computes in fp32. One source is compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize/code_type.h"
#include "simd/kernel_family.h"

namespace kvpage {

// Which comes first for 16-bit rows: rounding the normalised numbers to the dtype, or their product with the weight.
enum class NormOrder { kRoundThenScale, kScaleThenRound };

// Each is one run of `size` elements. `sum` and `out` may be `x` or `residual`.
struct NormRow {
  const std::byte *x, *residual, *weight;  // residual: or null
  std::byte *sum, *out;                    // sum: where h goes; null without a residual
  int64_t size;
  float eps, offset;
  NormOrder order;
};

struct NormKernel {
  const char* name;
  void (*normalize)(RowType type, const NormRow& row);
};

const KernelFamily<NormKernel>& norm_kernels();

KVPAGE_DECLARE_KERNELS(NormKernel, norm_kernel);

}  // namespace kvpage
