// Stream and Event, which are freed with their scope. Only .cu files include it.
#pragma once

#include "cuda/cuda_check.h"

namespace kvpage {

// A stream on the current device that does not wait for the legacy null stream by itself.
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

  // Lets all later work on `after` wait for the work that is on `before` now.
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
