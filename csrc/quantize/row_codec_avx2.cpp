// Compiled for avx2 on x86-64; empty elsewhere.
#if defined(__x86_64__)
#define KVPAGE_LANES 8
#include "quantize/row_dispatch_impl.h"

namespace kvpage {
const RowCodec row_codec_avx2 = {"avx2", encode, decode, encode_int8_bf16, encode_by_table, decode_by_table};
}
#endif
