// Compiled for avx2 on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_REGISTER_BYTES 32
#include "simd/transpose_impl.h"

namespace kvpage {
const TransposeKernel transpose_kernel_avx2 = {"avx2", transpose_elements, nullptr};
}
#endif
