// What every machine of the architecture has.
#define KVPAGE_REGISTER_BYTES 16
#include "simd/transpose_impl.h"

namespace kvpage {
const TransposeKernel transpose_kernel_base = {"base", transpose_elements, nullptr};
}
