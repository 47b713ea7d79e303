// What every machine of the architecture has.
#define KVPAGE_LANES 4
#include "quantize/row_dispatch_impl.h"

namespace kvpage {
const RowCodec row_codec_base = {"base", encode, decode, encode_int8_bf16, encode_by_table, decode_by_table};
}
