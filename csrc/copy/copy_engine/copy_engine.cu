#include "copy/copy_engine/copy_engine.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <optional>
#include <string>

#include "copy/copy_engine/extent_arrays.h"
#include "cuda/cuda_check.h"
#include "cuda/cuda_stream.h"
#include "cuda/device_guard.h"

namespace kvpage {

namespace {

constexpr size_t kExtentsPerBatch = size_t{1} << 16;  // bounds the memory of the arrays, 24 bytes an extent

// Source bytes are read in the stream's order, both ways: read at any other time, a block could be copied before the
// work that writes it has run.
#if CUDART_VERSION >= 12080
using BatchedCopy = PFN_cuMemcpyBatchAsync_v12080;

// Asked for as of CUDA 12.8, whose signature reports the extent that failed; newer drivers keep that entry point. Null
// for an older driver.
BatchedCopy find_batched_copy() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &entry, 12080, cudaEnableDefault, &found);
  if (code != cudaSuccess) cudaGetLastError();  // cudaErrorInvalidValue: the driver is older than 12.8
  const bool usable = code == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<BatchedCopy>(entry) : nullptr;
}

// False if the driver says that it cannot do this at all.
bool copy_batch(BatchedCopy copy, ExtentArrays& extents, cudaStream_t stream) {
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;  // not by a kernel that takes multiprocessors
  size_t first = 0, failed = 0;
  const CUresult code =
      copy(extents.dsts(), extents.srcs(), extents.sizes(), extents.count(), &attributes, &first, 1, &failed, stream);
  if (code == CUDA_ERROR_NOT_SUPPORTED) return false;
  if (code != CUDA_SUCCESS) {
    throw CudaError("cuMemcpyBatchAsync", "CUresult " + std::to_string(static_cast<int>(code)),
                    (failed < extents.count() ? "extent " + std::to_string(failed) : std::string("no one extent")) +
                        " of " + std::to_string(extents.count()));
  }
  return true;
}
#else
using BatchedCopy = void*;
BatchedCopy find_batched_copy() { return nullptr; }
bool copy_batch(BatchedCopy, ExtentArrays&, cudaStream_t) { return false; }
#endif

void copy_each(ExtentArrays& extents, cudaStream_t stream) {
  for (size_t i = 0; i < extents.count(); ++i) {
    KVPAGE_CUDA(cudaMemcpyAsync, reinterpret_cast<void*>(extents.dsts()[i]), reinterpret_cast<void*>(extents.srcs()[i]),
                extents.sizes()[i], cudaMemcpyDefault, stream);
  }
}

bool is_legacy(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }

}  // namespace

struct CopyEngine::State {
  State(int device_, BatchedCopy batched_copy_) : device(device_), batched_copy(batched_copy_) {}

  const int device;
  const BatchedCopy batched_copy;  // null: extent by extent
  ExtentArrays extents{kExtentsPerBatch};
  std::optional<Stream> side;
  std::optional<Event> before, after;

  void copy(const CopyPlan& plan, cudaStream_t stream) {
    extents.fill(plan, [&] {
      if (!batched_copy || !copy_batch(batched_copy, extents, stream)) copy_each(extents, stream);
    });
  }

  // The null stream goes on after the side stream even when a copy fails half-way: enqueued copies still run.
  void copy_beside(const CopyPlan& plan, cudaStream_t stream) {
    if (!side) side.emplace();
    if (!before) before.emplace();
    if (!after) after.emplace();
    before->order(stream, side->get());
    try {
      copy(plan, side->get());
    } catch (const CudaError&) {
      after->order(side->get(), stream);
      throw;
    }
    after->order(side->get(), stream);
  }
};

CopyEngine::CopyEngine(int device, bool pinned)
    : state_(std::make_unique<State>(device, pinned ? find_batched_copy() : nullptr)) {}

CopyEngine::~CopyEngine() = default;

void CopyEngine::run(const CopyPlan& plan, uintptr_t stream_handle) {
  if (plan.num_extents() == 0) return;
  const DeviceGuard guard(state_->device);
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  check_not_capturing(stream);
  if (state_->batched_copy && is_legacy(stream)) {
    state_->copy_beside(plan, stream);
  } else {
    state_->copy(plan, stream);
  }
}

bool has_batched_copy() { return find_batched_copy() != nullptr; }

}  // namespace kvpage
