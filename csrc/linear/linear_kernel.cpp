#include "linear/linear_kernel.h"

namespace kvpage {

const KernelFamily<LinearKernel>& linear_kernels() {
  static const KernelFamily<LinearKernel> family{
#if defined(__x86_64__)
      &linear_kernel_avx512bf16,
#endif
      KVPAGE_COMPILED_KERNELS(linear_kernel), &linear_kernel_pairs_model};
  return family;
}

}  // namespace kvpage
