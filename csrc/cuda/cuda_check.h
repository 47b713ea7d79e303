// cuda_check and KVPAGE_CUDA: a call of CUDA that fails throws CudaError. Only .cu files include it.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cuda_error.h"

namespace kvpage {

// Throws CudaError with the names of the call and of the error. Takes the error from the runtime, so that the next call
// of another user of the context (torch) does not report it again.
inline void cuda_check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();
  throw CudaError(call, cudaGetErrorName(code), cudaGetErrorString(code));
}

#define KVPAGE_CUDA(call, ...) ::kvpage::cuda_check(call(__VA_ARGS__), #call)

}  // namespace kvpage
