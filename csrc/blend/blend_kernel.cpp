#include "blend/blend_kernel.h"

namespace kvpage {

const KernelFamily<BlendKernel>& blend_kernels() {
  static const KernelFamily<BlendKernel> family{KVPAGE_COMPILED_KERNELS(blend_kernel)};
  return family;
}

}  // namespace kvpage
