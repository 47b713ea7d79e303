// Compiled for avx512 on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_LANES 16
#include "blend/blend_kernel_impl.h"

namespace kvpage {
const BlendKernel blend_kernel_avx512 = {"avx512", turn, squared_difference};
}
#endif
