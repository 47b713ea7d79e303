#include "block_copier.h"

#include <algorithm>

#include "check.h"
#include "host_copy.h"

#ifdef KVPAGE_HAS_CUDA
#include "copy_blocks.h"
#include "swap_blocks.h"
#else
namespace kvpage {
class CopyEngine {};
}  // namespace kvpage
#endif

namespace kvpage {

Executor choose_executor(const Placement& placement) {
  const bool src_on_host = placement.src_device == kHost, dst_on_host = placement.dst_device == kHost;
  if (src_on_host && dst_on_host) return Executor::kHostThreads;
  return src_on_host || dst_on_host ? Executor::kCopyEngine : Executor::kKernel;
}

BlockCopier::BlockCopier(const BlockShape& shape, const CacheView& src, const CacheView& dst, const Placement& placement)
    : geometry_(shape, src, dst), placement_(placement), executor_(choose_executor(placement)) {
  check(executor_ != Executor::kKernel || placement.src_device == placement.dst_device,
        "src and dst must be on one device, got devices ", placement.src_device, " and ", placement.dst_device);
#ifdef KVPAGE_HAS_CUDA
  if (executor_ == Executor::kCopyEngine) {
    engine_ = std::make_unique<CopyEngine>(std::max(placement.src_device, placement.dst_device), placement.pinned);
  }
#else
  check(executor_ == Executor::kHostThreads, "src and dst must be on the CPU in a build without CUDA");
#endif
}

BlockCopier::~BlockCopier() = default;

void BlockCopier::run(const int64_t* pairs, int64_t num_pairs, uintptr_t stream, int max_threads) {
  const CopyPlan plan(geometry_, pairs, num_pairs);
  if (executor_ == Executor::kHostThreads) return copy_on_host(plan, max_threads);
#ifdef KVPAGE_HAS_CUDA
  if (executor_ == Executor::kKernel) return copy_on_device(plan, placement_.src_device, stream);
  const std::lock_guard lock(engine_mutex_);  // the engine's side stream and events are one set
  engine_->run(plan, stream);
#else
  static_cast<void>(stream);
#endif
}

}  // namespace kvpage
