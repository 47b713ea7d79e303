#include "copy/sm_kernel/sm_kernel.h"

#include <algorithm>
#include <cstring>

#include "copy/sm_kernel/launch_plan.h"
#include "cuda/cuda_check.h"
#include "cuda/cuda_stream.h"
#include "cuda/device_guard.h"

namespace kvpage {
namespace {

#if CUDART_VERSION >= 12010
constexpr int64_t kMostParameters = 32764;  // bytes of a kernel's parameters, from sm_70 on
#else
constexpr int64_t kMostParameters = 4096;
#endif
constexpr int64_t kMostMetadata = kMostParameters / 64 * 64 - 64;
constexpr int64_t kFewMetadata = std::min<int64_t>(8192 - 64, kMostMetadata);  // parameters cost a launch time

// A tile's fragments, then its pairs, as kernel parameters.
template <int64_t kBytes>
struct InlineCopy {
  CopyParams params;  // its two pointers are set by the thread
  alignas(8) unsigned char metadata[kBytes];
};
static_assert(sizeof(InlineCopy<kMostMetadata>) <= kMostParameters);

template <typename Vector, int64_t kBytes>
__global__ void __launch_bounds__(kThreadsPerGroup) copy_inline(const __grid_constant__ InlineCopy<kBytes> inlined) {
  CopyParams params = inlined.params;
  params.fragments = reinterpret_cast<const Fragment*>(inlined.metadata);
  params.pairs = reinterpret_cast<const BlockPair*>(inlined.metadata + params.num_fragments * sizeof(Fragment));
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  copy_thread<Vector>(params, thread, gridDim.x * static_cast<int64_t>(blockDim.x));
}

void write_metadata(const CopyPlan& plan, const CopyTile& tile, unsigned char* out) {
  const size_t fragment_bytes = tile.num_fragments * sizeof(Fragment);
  std::memcpy(out, plan.geometry().fragments().data() + tile.first_fragment, fragment_bytes);
  std::memcpy(out + fragment_bytes, plan.pairs().data() + tile.first_pair, tile.num_pairs * sizeof(BlockPair));
}

template <int64_t kBytes>
void launch(const CopyPlan& plan, const CopyTile& tile, int64_t vector_bytes, int64_t max_groups, cudaStream_t stream) {
  InlineCopy<kBytes> inlined;  // what the tile does not fill is never read
  inlined.params = copy_params(plan, tile, nullptr, nullptr, vector_bytes);
  write_metadata(plan, tile, inlined.metadata);
  const int64_t num_threads = launch_threads(inlined.params.num_units, max_groups);
  const auto num_groups = static_cast<unsigned int>(num_threads / kThreadsPerGroup);
  dispatch_vector(vector_bytes, [&](auto vector) {
    copy_inline<decltype(vector), kBytes><<<num_groups, kThreadsPerGroup, 0, stream>>>(inlined);
  });
  cuda_check(cudaGetLastError(), "copy_inline launch");
}

}  // namespace

void run_copy_kernel(const CopyPlan& plan, int device, uintptr_t stream_handle, int64_t max_groups) {
  if (plan.num_extents() == 0) return;
  const DeviceGuard guard(device);
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  check_not_capturing(stream);
  const int64_t vector_bytes = plan_vector_bytes(plan);
  const auto num_fragments = static_cast<int64_t>(plan.geometry().fragments().size());
  const auto num_pairs = static_cast<int64_t>(plan.pairs().size());
  for (const CopyTile& tile : split_for_launches(num_fragments, num_pairs, kMostMetadata)) {
    const auto launch_tile = tile.metadata_bytes() <= kFewMetadata ? &launch<kFewMetadata> : &launch<kMostMetadata>;
    launch_tile(plan, tile, vector_bytes, max_groups, stream);
  }
}

}  // namespace kvpage
