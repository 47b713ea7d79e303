// Compiled with -mavx2 -mfma -mf16c on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_LANES 8
#define KVPAGE_DOT_ROWS 2
#define KVPAGE_SUM_COLUMNS 2
#include "attention/attention_kernel_impl.h"

namespace kvpage {
const AttentionKernel attention_kernel_avx2 = {"avx2", attend, merge, finish};
}
#endif
