// Compiled for avx512 on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_REGISTER_BYTES 64
#include "simd/transpose_impl.h"

namespace kvpage {
const TransposeKernel transpose_kernel_avx512 = {"avx512", transpose_elements, stream_elements};
}
#endif
