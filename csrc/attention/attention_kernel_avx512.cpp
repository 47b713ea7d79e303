// Compiled with -mavx512{f,bw,dq,vl} and what AVX2 has on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_LANES 16
#define KVPAGE_DOT_ROWS 4
#define KVPAGE_SUM_COLUMNS 4
#include "attention/attention_kernel_impl.h"

namespace kvpage {
const AttentionKernel attention_kernel_avx512 = {"avx512", attend, merge, finish};
}
#endif
