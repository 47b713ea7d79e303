// BlockCopier: a swap or a copy of blocks. It makes the plan, chooses the executor and runs it.
//
//   block ids ──► CopyPlan (copy/plan/): which bytes go where ──► choose_executor ──► one of three executors
//
//   host ─► host                  threads
//   device ─► the same device     SM kernel
//   host ─► device and back       SM kernel for small extents of pinned memory: one more costs it no time of its own
//                                 copy engine for all else: no multiprocessor is taken from the computation
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "copy/plan/cache_view.h"
#include "copy/plan/copy_geometry.h"
#include "copy/plan/copy_plan.h"

namespace kvpage {

class CopyEngine;

// The place of one side: a CUDA device's index, or kHost.
constexpr int kHost = -1;

struct Placement {
  int src_device, dst_device;
  bool pinned;  // whether all of the host side is page-locked
};

enum class Executor { kHostThreads, kCopyEngine, kKernel };

// The use of the SM kernel between host and device: for extents of up to `max_bytes` on average (0: never), with at
// most `max_groups` groups of threads. The other multiprocessors stay free for the computation. The best max_bytes is
// measured on the device, for each direction, by kvpage.cache.calibration.
struct KernelLimits {
  int64_t max_bytes, max_groups;
};

// Returns the executor for so many extents of so many bytes between these places. Nothing else decides it. The copy
// engine takes a single extent of any size: there is nothing to save.
Executor choose_executor(const Placement& placement, int64_t extent_bytes, int64_t num_extents,
                         int64_t kernel_max_bytes);

class BlockCopier {
 public:
  // Throws InvalidArgument as CopyGeometry does, for limits out of range, for two different devices, and for a device
  // in a build without CUDA. Where the device does not see the host side under its own addresses, the kernel is never
  // used between them.
  BlockCopier(const std::vector<BlockShape>& shapes, const CacheView& src, const CacheView& dst,
              const Placement& placement, const KernelLimits& limits);
  ~BlockCopier();

  const CopyGeometry& geometry() const { return geometry_; }

  // Returns the executor that `run` would take. Throws as CopyPlan does.
  Executor executor(const int64_t* pairs, int64_t num_pairs) const;

  // Copies the pairs, [num_pairs, 2]. On the host it waits; on a device it enqueues the copy on `stream`. Any number of
  // threads may call it. Throws as CopyPlan does, before anything is written, and as the executors do.
  void run(const int64_t* pairs, int64_t num_pairs, uintptr_t stream, int max_threads);

 private:
  Executor choose(const CopyPlan& plan) const;

  CopyGeometry geometry_;
  Placement placement_;
  KernelLimits limits_;
  std::mutex engine_mutex_;
  std::unique_ptr<CopyEngine> engine_;
};

}  // namespace kvpage
