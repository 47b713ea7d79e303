#include "copy/copier/block_copier.h"

#include <algorithm>

#include "base/check.h"
#include "copy/host/host_copy.h"
#include "copy/sm_kernel/launch_plan.h"

#ifdef KVPAGE_HAS_CUDA
#include "copy/copy_engine/copy_engine.h"
#include "copy/sm_kernel/sm_kernel.h"
#include "cuda/cuda_devices.h"
#else
namespace kvpage {
class CopyEngine {};
}  // namespace kvpage
#endif

namespace kvpage {
namespace {

bool between_host_and_device(const Placement& placement) {
  return (placement.src_device == kHost) != (placement.dst_device == kHost);
}

int device_of(const Placement& placement) { return std::max(placement.src_device, placement.dst_device); }

#ifdef KVPAGE_HAS_CUDA
bool sees_all(int device, const CacheView& host) {
  return std::all_of(host.layers.begin(), host.layers.end(), [device](const LayerView& layer) {
    return sees_host_memory(device, reinterpret_cast<const void*>(static_cast<uintptr_t>(layer.address)));
  });
}
#endif

}  // namespace

Executor choose_executor(const Placement& placement, int64_t extent_bytes, int64_t num_extents,
                         int64_t kernel_max_bytes) {
  if (!between_host_and_device(placement)) {
    return placement.src_device == kHost ? Executor::kHostThreads : Executor::kKernel;
  }
  const bool kernel = placement.pinned && num_extents > 1 && extent_bytes <= kernel_max_bytes;
  return kernel ? Executor::kKernel : Executor::kCopyEngine;
}

BlockCopier::BlockCopier(const std::vector<BlockShape>& shapes, const CacheView& src, const CacheView& dst,
                         const Placement& placement, const KernelLimits& limits)
    : geometry_(shapes, src, dst), placement_(placement), limits_(limits) {
  check(limits.max_bytes >= 0, "kernel_max_bytes must not be negative, got ", limits.max_bytes);
  check(limits.max_groups > 0 && limits.max_groups <= kMostGroups, "max_groups must be between 1 and ", kMostGroups,
        ", got ", limits.max_groups);
  const bool on_host = device_of(placement) == kHost;
  check(on_host || between_host_and_device(placement) || placement.src_device == placement.dst_device,
        "src and dst must be on one device, got devices ", placement.src_device, " and ", placement.dst_device);
#ifdef KVPAGE_HAS_CUDA
  if (!between_host_and_device(placement)) return;
  const int device = device_of(placement);
  engine_ = std::make_unique<CopyEngine>(device, placement.pinned);
  const bool usable = limits_.max_bytes > 0 && placement.pinned;
  if (usable && !sees_all(device, placement.src_device == kHost ? src : dst)) limits_.max_bytes = 0;
#else
  check(on_host, "src and dst must be on the CPU in a build without CUDA");
#endif
}

BlockCopier::~BlockCopier() = default;

Executor BlockCopier::choose(const CopyPlan& plan) const {
  const int64_t extent_bytes = plan.num_extents() ? plan.num_bytes() / plan.num_extents() : 0;
  return choose_executor(placement_, extent_bytes, plan.num_extents(), limits_.max_bytes);
}

Executor BlockCopier::executor(const int64_t* pairs, int64_t num_pairs) const {
  return choose(CopyPlan(geometry_, pairs, num_pairs));
}

void BlockCopier::run(const int64_t* pairs, int64_t num_pairs, uintptr_t stream, int max_threads) {
  const CopyPlan plan(geometry_, pairs, num_pairs);
  const Executor executor = choose(plan);
  if (executor == Executor::kHostThreads) return copy_on_host(plan, max_threads);
#ifdef KVPAGE_HAS_CUDA
  if (executor == Executor::kKernel) {
    const int64_t max_groups = between_host_and_device(placement_) ? limits_.max_groups : kMostGroups;
    return run_copy_kernel(plan, device_of(placement_), stream, max_groups);
  }
  const std::lock_guard lock(engine_mutex_);  // the engine's side stream, events and arrays are one set
  engine_->run(plan, stream);
#else
  static_cast<void>(stream);
#endif
}

}  // namespace kvpage
