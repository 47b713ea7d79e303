#include "simd/transpose.h"

#include <cstring>
#include <vector>

#include "base/check.h"
#include "simd/instruction_sets.h"

namespace kvpage {
namespace {

std::vector<const TransposeKernel*> supported() {
  std::vector<const TransposeKernel*> kernels;
#if defined(__x86_64__)
  if (has_avx512()) kernels.push_back(&transpose_kernel_avx512);
  if (has_avx2()) kernels.push_back(&transpose_kernel_avx2);
#endif
  kernels.push_back(&transpose_kernel_base);
  return kernels;
}

}  // namespace

const TransposeKernel& transpose_kernel() {
  static const TransposeKernel& best = *supported().front();
  return best;
}

const TransposeKernel& transpose_kernel(const char* name) {
  for (const TransposeKernel* kernel : supported())
    if (std::strcmp(kernel->name, name) == 0) return *kernel;
  fail("kernel must be one that this machine has, got ", name);
}

}  // namespace kvpage
