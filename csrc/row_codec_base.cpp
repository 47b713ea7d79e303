// What every machine of the architecture has.
#define KVPAGE_LANES 4
#include "row_codec_impl.h"

namespace kvpage {
const RowCodec row_codec_base = {"base", encode, decode};
}
