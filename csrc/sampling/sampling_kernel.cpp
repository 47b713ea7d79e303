#include "sampling/sampling_kernel.h"

namespace kvpage {

const KernelFamily<SamplingKernel>& sampling_kernels() {
  static const KernelFamily<SamplingKernel> family{KVPAGE_COMPILED_KERNELS(sampling_kernel)};
  return family;
}

}  // namespace kvpage
