// CudaMachine: the driver and the devices that CUDA finds here. Only in builds with CUDA.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace kvpage {

struct CudaDevice {
  std::string name;
  int major, minor;      // compute capability
  int num_copy_engines;  // asyncEngineCount
};

struct CudaMachine {
  int driver_version = 0;  // 1000 * major + 10 * minor; 0 without a driver
  std::vector<CudaDevice> devices;
};

// Returns why no device can be used: the driver is missing or too old, or there is no device. Nothing where one can be.
std::optional<std::string> find_cuda_error();

// Reads properties and makes no context on any device.
CudaMachine find_cuda_machine();

// Returns whether the device uses the page-locked host memory at `address` under that very address. False for pageable
// memory, and where the memory was locked without being mapped.
bool sees_host_memory(int device, const void* address);

}  // namespace kvpage
