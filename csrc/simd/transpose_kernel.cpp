#include "simd/transpose_kernel.h"

namespace kvpage {

const KernelFamily<TransposeKernel>& transpose_kernels() {
  static const KernelFamily<TransposeKernel> family{KVPAGE_COMPILED_KERNELS(transpose_kernel)};
  return family;
}

}  // namespace kvpage
