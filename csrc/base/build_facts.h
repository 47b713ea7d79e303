// The facts of the build as CMake knows them. Their file is compiled anew after each change of a source; it is short.
#pragma once

namespace kvpage {

extern const char* const kBuildVersion;
extern const char* const kBuildSources;  // a digest
extern const char* const kBuildCompiler;
extern const char* const kBuildCuda;  // a version; null without CUDA
extern const char* const kBuildCudaArchs;  // null without CUDA

}  // namespace kvpage
