#include "linear/turned_kernel.h"

namespace kvpage {

const KernelFamily<TurnedKernel>& turned_kernels() {
  static const KernelFamily<TurnedKernel> family{KVPAGE_COMPILED_KERNELS(turned_kernel)};
  return family;
}

}  // namespace kvpage
