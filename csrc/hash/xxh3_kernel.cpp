#include "hash/xxh3_kernel.h"

namespace kvpage {

const KernelFamily<Xxh3Kernel>& xxh3_kernels() {
  static const KernelFamily<Xxh3Kernel> family{KVPAGE_COMPILED_KERNELS(xxh3_kernel)};
  return family;
}

}  // namespace kvpage
