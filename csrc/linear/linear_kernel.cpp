#include "linear/linear_kernel.h"

namespace kvpage {

const KernelFamily<LinearKernel>& linear_kernels() {
  static const KernelFamily<LinearKernel> family{KVPAGE_COMPILED_KERNELS(linear_kernel)};
  return family;
}

}  // namespace kvpage
