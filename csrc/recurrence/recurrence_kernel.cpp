#include "recurrence/recurrence_kernel.h"

namespace kvpage {

const KernelFamily<RecurrenceKernel>& recurrence_kernels() {
  static const KernelFamily<RecurrenceKernel> family{KVPAGE_COMPILED_KERNELS(recurrence_kernel)};
  return family;
}

}  // namespace kvpage
