// What every CUDA file needs: errors by name, the device for the length of a call, streams and events that are freed.
// Only .cu files include it.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cuda_error.h"

namespace kvpage {

// Throws CudaError with the call's and the error's name. The error is taken from the runtime, so that the next call of
// whoever shares the context (torch) does not report it again.
inline void cuda_check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();
  throw CudaError(call, cudaGetErrorName(code), cudaGetErrorString(code));
}

#define KVPAGE_CUDA(call, ...) ::kvpage::cuda_check(call(__VA_ARGS__), #call)

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

// A stream of our own on the current device, that does not wait for the legacy null stream by itself.
class Stream {
 public:
  Stream() { KVPAGE_CUDA(cudaStreamCreateWithFlags, &stream_, cudaStreamNonBlocking); }
  ~Stream() { cudaStreamDestroy(stream_); }  // work that was enqueued still completes
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// An event on the current device that orders streams and measures nothing.
class Event {
 public:
  Event() { KVPAGE_CUDA(cudaEventCreateWithFlags, &event_, cudaEventDisableTiming); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // What is enqueued on `after` from now on waits for what is on `before` now.
  void order(cudaStream_t before, cudaStream_t after) {
    KVPAGE_CUDA(cudaEventRecord, event_, before);
    KVPAGE_CUDA(cudaStreamWaitEvent, after, event_, 0);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Throws InvalidArgument if `stream` is recording a graph: a plan holds addresses and block ids of one moment.
void check_not_capturing(cudaStream_t stream);

}  // namespace kvpage
