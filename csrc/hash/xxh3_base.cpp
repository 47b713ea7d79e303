// What every machine of the architecture has.
#define KVPAGE_LANES 2
#include "hash/xxh3_impl.h"

namespace kvpage {
const Xxh3Kernel xxh3_base = {"base", add_blocks, add_and_copy_blocks, add_and_stream_blocks, add_stripes};
}
