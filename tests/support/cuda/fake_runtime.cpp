// A CUDA runtime without a device: it accepts each call and counts it, so that the host's part of a call can be run,
// counted and timed. Kernels are launched nowhere and memory is copied nowhere.
#include "fake_runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

#include <cstring>

FakeCalls fake_calls;
bool fake_keeps = true, fake_batches = true;

namespace {

int current_device = 0;

CUresult batched_copy(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count, CUmemcpyAttributes* attributes,
                      size_t*, size_t, size_t*, CUstream) {
  ++fake_calls.batches;
  fake_calls.flags = attributes->flags;
  for (size_t i = 0; fake_keeps && i < count; ++i) fake_calls.extents.push_back({srcs[i], dsts[i], sizes[i]});
  return CUDA_SUCCESS;
}

CUresult primary_context(CUdevice, unsigned int* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}

void* entry_of(const char* symbol) {
  if (fake_batches && !std::strcmp(symbol, "cuMemcpyBatchAsync")) return reinterpret_cast<void*>(batched_copy);
  if (!std::strcmp(symbol, "cuDevicePrimaryCtxGetState")) return reinterpret_cast<void*>(primary_context);
  return nullptr;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }
const char* cudaGetErrorString(cudaError_t) { return "fake"; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaErrorNotSupported; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = cudaStream_t(8), cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = cudaEvent_t(8), cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  found->type = cudaMemoryTypeHost, found->devicePointer = const_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++fake_calls.copies;
  if (fake_keeps) {
    fake_calls.extents.push_back(
        {reinterpret_cast<unsigned long long>(src), reinterpret_cast<unsigned long long>(dst), bytes});
  }
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *entry = entry_of(symbol);
  *found = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  ++fake_calls.launches;
  fake_calls.threads += uint64_t{grid.x} * block.x;
  return cudaSuccess;
}

// The names that nvcc's code for the host asks for.
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(nullptr, grid, block, arguments, shared, stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void*) { return *kernel = cudaKernel_t(8), cudaSuccess; }

static dim3 pushed_grid, pushed_block;
static size_t pushed_shared;
static cudaStream_t pushed_stream;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed_grid = grid, pushed_block = block, pushed_shared = shared, pushed_stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed_grid, *block = pushed_block, *shared = pushed_shared;
  *static_cast<cudaStream_t*>(stream) = pushed_stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
char __cudaInitModule(void**) { return 1; }

}  // extern "C"
