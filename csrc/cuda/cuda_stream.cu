#include "cuda/cuda_stream.h"

#include "base/check.h"

namespace kvpage {

void check_not_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  KVPAGE_CUDA(cudaStreamIsCapturing, stream, &status);
  check(status == cudaStreamCaptureStatusNone, "stream must not be capturing a graph when blocks are moved");
}

}  // namespace kvpage
