// What every machine of the architecture has.
#define KVPAGE_LANES 4
#include "blend/blend_kernel_impl.h"

namespace kvpage {
const BlendKernel blend_kernel_base = {"base", turn, squared_difference};
}
