#include "linear/norms/norm_kernel.h"

namespace kvpage {

const KernelFamily<NormKernel>& norm_kernels() {
  static const KernelFamily<NormKernel> family{KVPAGE_COMPILED_KERNELS(norm_kernel)};
  return family;
}

}  // namespace kvpage
