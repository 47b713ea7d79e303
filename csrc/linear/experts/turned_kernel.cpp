#include "linear/experts/turned_kernel.h"

namespace kvpage {

const KernelFamily<TurnedKernel>& turned_kernels() {
  static const KernelFamily<TurnedKernel> family{
#if defined(__x86_64__)
      &turned_kernel_avx512bf16,
#endif
      KVPAGE_COMPILED_KERNELS(turned_kernel), &turned_kernel_pairs_model};
  return family;
}

}  // namespace kvpage
