#include "codec/exponent_kernel.h"

namespace kvpage {

const KernelFamily<ExponentKernel>& exponent_kernels() {
  static const KernelFamily<ExponentKernel> family{KVPAGE_COMPILED_KERNELS(exponent_kernel)};
  return family;
}

}  // namespace kvpage
