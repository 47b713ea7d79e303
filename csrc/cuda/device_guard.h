// DeviceGuard: the current device for the length of a call. Only .cu files include it.
#pragma once

#include "cuda/cuda_check.h"
#include "cuda/device_switch.h"

namespace kvpage {

// Returns whether the device has a context: whether anything has used it in this process. True where the driver cannot
// tell.
bool has_context(int device) noexcept;

struct CudaRuntime {
  static int current() {
    int device = 0;
    KVPAGE_CUDA(cudaGetDevice, &device);
    return device;
  }
  static void set(int device) { KVPAGE_CUDA(cudaSetDevice, device); }
  static void restore(int device) noexcept { cudaSetDevice(device); }
  static bool has_context(int device) noexcept { return kvpage::has_context(device); }
};

// Makes `device` the current one, and at the end of the scope the earlier one again, if that has a context.
using DeviceGuard = DeviceSwitch<CudaRuntime>;

}  // namespace kvpage
