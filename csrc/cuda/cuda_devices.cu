#include "cuda/cuda_devices.h"

#include "cuda/cuda_check.h"
#include "cuda/device_guard.h"

namespace kvpage {

std::optional<std::string> find_cuda_error() {
  int num_devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&num_devices);
  if (code == cudaSuccess) return std::nullopt;
  cudaGetLastError();
  return std::string("cudaGetDeviceCount returned ") + cudaGetErrorName(code);
}

CudaMachine find_cuda_machine() {
  CudaMachine machine;
  KVPAGE_CUDA(cudaDriverGetVersion, &machine.driver_version);
  if (find_cuda_error()) return machine;
  int num_devices = 0;
  KVPAGE_CUDA(cudaGetDeviceCount, &num_devices);
  for (int device = 0; device < num_devices; ++device) {
    cudaDeviceProp found;
    KVPAGE_CUDA(cudaGetDeviceProperties, &found, device);
    machine.devices.push_back({found.name, found.major, found.minor, found.asyncEngineCount});
  }
  return machine;
}

bool sees_host_memory(int device, const void* address) {
  if (address == nullptr) return false;  // an empty tensor's
  const DeviceGuard guard(device);
  cudaPointerAttributes found{};
  KVPAGE_CUDA(cudaPointerGetAttributes, &found, address);
  return found.type == cudaMemoryTypeHost && found.devicePointer == address;
}

}  // namespace kvpage
