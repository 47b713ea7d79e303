#include "cuda/device_guard.h"

#include <cuda.h>
#include <cudaTypedefs.h>

namespace kvpage {
namespace {

// Returns a function of the driver, as of CUDA `version`; null where it has none.
template <typename Function>
Function find_in_driver(const char* name, [[maybe_unused]] unsigned int version) noexcept {
  void* entry = nullptr;
#if CUDART_VERSION >= 12050
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  if (found != cudaDriverEntryPointSuccess) entry = nullptr;
#elif CUDART_VERSION >= 12000
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t code = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found);
  if (found != cudaDriverEntryPointSuccess) entry = nullptr;
#else
  const cudaError_t code = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault);
#endif
  if (code == cudaSuccess) return reinterpret_cast<Function>(entry);
  cudaGetLastError();
  return nullptr;
}

}  // namespace

bool has_context(int device) noexcept {
  static const auto get_device = find_in_driver<PFN_cuDeviceGet_v2000>("cuDeviceGet", 2000);
  static const auto get_state =
      find_in_driver<PFN_cuDevicePrimaryCtxGetState_v7000>("cuDevicePrimaryCtxGetState", 7000);
  CUdevice handle = 0;
  unsigned int flags = 0;
  int is_active = 1;
  const bool answers = get_device && get_state && get_device(&handle, device) == CUDA_SUCCESS &&
                       get_state(handle, &flags, &is_active) == CUDA_SUCCESS;
  return !answers || is_active != 0;
}

}  // namespace kvpage
