#include "base/build_facts.h"

namespace kvpage {

const char* const kBuildVersion = KVPAGE_VERSION;
const char* const kBuildSources = KVPAGE_SOURCES;

#ifdef __clang__
const char* const kBuildCompiler = __VERSION__;
#else
const char* const kBuildCompiler = "GCC " __VERSION__;
#endif

#ifdef KVPAGE_HAS_CUDA
const char* const kBuildCuda = KVPAGE_CUDA_VERSION;
const char* const kBuildCudaArchs = KVPAGE_CUDA_ARCHS;
#else
const char* const kBuildCuda = nullptr;
const char* const kBuildCudaArchs = nullptr;
#endif

}  // namespace kvpage
