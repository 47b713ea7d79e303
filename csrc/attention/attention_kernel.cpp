#include "attention/attention_kernel.h"

namespace kvpage {

const KernelFamily<AttentionKernel>& attention_kernels() {
  static const KernelFamily<AttentionKernel> family{KVPAGE_COMPILED_KERNELS(attention_kernel)};
  return family;
}

}  // namespace kvpage
