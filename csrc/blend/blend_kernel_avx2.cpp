// Compiled for avx2 on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_LANES 8
#include "blend/blend_kernel_impl.h"

namespace kvpage {
const BlendKernel blend_kernel_avx2 = {"avx2", turn, squared_difference};
}
#endif
