#include "copy_blocks.h"

#include <cstring>
#include <vector>

#include "cuda_check.h"

namespace kvpage {
namespace {

#if CUDART_VERSION >= 12010
constexpr size_t kMostParameters = 32764;  // bytes of a kernel's parameters, from sm_70 on
#else
constexpr size_t kMostParameters = 4096;
#endif
constexpr size_t kInlineBytes = kMostParameters / 64 * 64 - 64;

// Pieces, then pairs, as kernel parameters.
struct InlineCopy {
  CopyParams params;  // its two pointers are set by the thread
  alignas(8) unsigned char metadata[kInlineBytes];
};
static_assert(sizeof(InlineCopy) <= kMostParameters);

__device__ int64_t thread_id() { return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; }

__device__ int64_t grid_threads() { return gridDim.x * static_cast<int64_t>(blockDim.x); }

template <typename Vector>
__global__ void __launch_bounds__(kThreadsPerGroup) copy_inline(const __grid_constant__ InlineCopy inlined) {
  CopyParams params = inlined.params;
  params.pieces = reinterpret_cast<const Piece*>(inlined.metadata);
  params.pairs = reinterpret_cast<const BlockPair*>(inlined.metadata + params.num_pieces * sizeof(Piece));
  copy_thread<Vector>(params, thread_id(), grid_threads());
}

template <typename Vector>
__global__ void __launch_bounds__(kThreadsPerGroup) copy_uploaded(const CopyParams params) {
  copy_thread<Vector>(params, thread_id(), grid_threads());
}

unsigned int num_groups(const CopyParams& params) {
  return static_cast<unsigned int>(launch_threads(params.num_units) / kThreadsPerGroup);
}

size_t piece_bytes(const CopyPlan& plan) { return plan.geometry().pieces().size() * sizeof(Piece); }

size_t metadata_bytes(const CopyPlan& plan) { return piece_bytes(plan) + plan.pairs().size() * sizeof(BlockPair); }

void write_metadata(const CopyPlan& plan, unsigned char* out) {
  std::memcpy(out, plan.geometry().pieces().data(), piece_bytes(plan));
  std::memcpy(out + piece_bytes(plan), plan.pairs().data(), plan.pairs().size() * sizeof(BlockPair));
}

// Device memory in a stream's order: what follows on the stream may use it, and it is freed after what came before.
class StreamMemory {
 public:
  StreamMemory(size_t bytes, cudaStream_t stream) : stream_(stream) {
    KVPAGE_CUDA(cudaMallocAsync, &data_, bytes, stream);
  }
  ~StreamMemory() { cudaFreeAsync(data_, stream_); }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

void launch_inline(const CopyPlan& plan, int64_t vector_bytes, cudaStream_t stream) {
  InlineCopy inlined{};
  inlined.params = copy_params(plan, nullptr, nullptr, vector_bytes);
  write_metadata(plan, inlined.metadata);
  dispatch_vector(vector_bytes, [&](auto vector) {
    copy_inline<decltype(vector)><<<num_groups(inlined.params), kThreadsPerGroup, 0, stream>>>(inlined);
  });
  cuda_check(cudaGetLastError(), "copy_inline launch");
}

// For what is too much for parameters. The vector is pageable memory, and when a copy has read that is not promised on
// every device: the stream is waited for before it goes.
void launch_uploaded(const CopyPlan& plan, int64_t vector_bytes, cudaStream_t stream) {
  std::vector<unsigned char> metadata(metadata_bytes(plan));
  write_metadata(plan, metadata.data());
  const StreamMemory memory(metadata.size(), stream);
  KVPAGE_CUDA(cudaMemcpyAsync, memory.data(), metadata.data(), metadata.size(), cudaMemcpyHostToDevice, stream);
  KVPAGE_CUDA(cudaStreamSynchronize, stream);
  const CopyParams params =
      copy_params(plan, reinterpret_cast<const Piece*>(memory.data()),
                  reinterpret_cast<const BlockPair*>(memory.data() + piece_bytes(plan)), vector_bytes);
  dispatch_vector(vector_bytes, [&](auto vector) {
    copy_uploaded<decltype(vector)><<<num_groups(params), kThreadsPerGroup, 0, stream>>>(params);
  });
  cuda_check(cudaGetLastError(), "copy_uploaded launch");
}

}  // namespace

void copy_on_device(const CopyPlan& plan, int device, uintptr_t stream_handle) {
  if (plan.num_extents() == 0) return;
  const DeviceGuard guard(device);
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  check_not_capturing(stream);
  const int64_t vector_bytes = plan_vector_bytes(plan);
  if (metadata_bytes(plan) <= kInlineBytes) {
    launch_inline(plan, vector_bytes, stream);
  } else {
    launch_uploaded(plan, vector_bytes, stream);
  }
}

}  // namespace kvpage
