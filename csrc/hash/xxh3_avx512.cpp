// Compiled for avx512 on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_LANES 8
#include "hash/xxh3_impl.h"

namespace kvpage {
const Xxh3Kernel xxh3_avx512 = {"avx512", add_blocks, add_and_copy_blocks, add_and_stream_blocks, add_stripes};
}
#endif
