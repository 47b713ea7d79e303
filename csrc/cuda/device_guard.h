// DeviceGuard: the current device for the length of a call. Only .cu files include it.
#pragma once

#include "cuda/cuda_check.h"

namespace kvpage {

// Makes `device` the current one, and the earlier one again at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    KVPAGE_CUDA(cudaGetDevice, &previous_);
    changed_ = previous_ != device;
    KVPAGE_CUDA(cudaSetDevice, device);  // also where it is the current one: binds its context to a new thread
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace kvpage
