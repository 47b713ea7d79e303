#include "attention/attention_kernel.h"

namespace kvpage {

const KernelFamily<AttentionKernel>& attention_kernels() {
  static const KernelFamily<AttentionKernel> family{
#if defined(__x86_64__)
      &attention_kernel_avx512bf16,
#endif
      KVPAGE_COMPILED_KERNELS(attention_kernel), &attention_kernel_pairs_model};
  return family;
}

}  // namespace kvpage
