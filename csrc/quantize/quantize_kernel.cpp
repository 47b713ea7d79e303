#include "quantize/quantize_kernel.h"

namespace kvpage {

const KernelFamily<QuantizeKernel>& quantize_kernels() {
  static const KernelFamily<QuantizeKernel> family{
#if defined(__x86_64__)
      &quantize_kernel_avx512bf16,
#endif
      KVPAGE_COMPILED_KERNELS(quantize_kernel)};
  return family;
}

const QuantizeKernel& best_quantize_kernel() { return quantize_kernels().best(); }

}  // namespace kvpage
