// What every machine of the architecture has: SSE2 on x86-64, NEON on aarch64.
#define KVPAGE_LANES 4
#if defined(__aarch64__)  // 32 registers
#define KVPAGE_DOT_ROWS 4
#define KVPAGE_SUM_COLUMNS 4
#else
#define KVPAGE_DOT_ROWS 2
#define KVPAGE_SUM_COLUMNS 2
#endif
#include "attention/attention_kernel_impl.h"

namespace kvpage {
const AttentionKernel attention_kernel_base = {"base", attend, merge, finish};
}
