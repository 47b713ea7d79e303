#include "blend/blend_kernel.h"

#include <cstring>
#include <vector>

#include "base/check.h"
#include "simd/instruction_sets.h"

namespace kvpage {
namespace {

std::vector<const BlendKernel*> supported() {
  std::vector<const BlendKernel*> kernels;
#if defined(__x86_64__)
  if (has_avx512()) kernels.push_back(&blend_kernel_avx512);
  if (has_avx2()) kernels.push_back(&blend_kernel_avx2);
#endif
  kernels.push_back(&blend_kernel_base);
  return kernels;
}

}  // namespace

const BlendKernel& blend_kernel() {
  static const BlendKernel& best = *supported().front();
  return best;
}

const BlendKernel& blend_kernel(const char* name) {
  for (const BlendKernel* kernel : supported())
    if (std::strcmp(kernel->name, name) == 0) return *kernel;
  fail("kernel must be one that this machine has, got ", name);
}

}  // namespace kvpage
