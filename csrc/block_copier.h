// BlockCopier: a geometry, and the executor that suits where its two sides lie. What kvpage.block_copy.BlockCopier holds.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "copy_plan.h"

namespace kvpage {

class CopyEngine;

// Where one side lies: a CUDA device's index, or kHost.
constexpr int kHost = -1;

struct Placement {
  int src_device, dst_device;
  bool pinned;  // whether all of the host side is page-locked
};

enum class Executor { kHostThreads, kCopyEngine, kKernel };

// Which executor runs plans between these places. The one place to decide it: a kernel that reads pinned host memory
// would be chosen here, by the plan's number of extents and their size.
Executor choose_executor(const Placement& placement);

class BlockCopier {
 public:
  // Throws InvalidArgument as CopyGeometry does, for two different devices, and for a device in a build without CUDA.
  BlockCopier(const BlockShape& shape, const CacheView& src, const CacheView& dst, const Placement& placement);
  ~BlockCopier();

  const CopyGeometry& geometry() const { return geometry_; }

  // Copies the pairs, [num_pairs, 2], and on the host waits for it; on a device enqueues it on `stream`. Any number of
  // threads may call it. Throws as CopyPlan does, before anything is written, and as the executors do.
  void run(const int64_t* pairs, int64_t num_pairs, uintptr_t stream, int max_threads);

 private:
  CopyGeometry geometry_;
  Placement placement_;
  Executor executor_;
  std::mutex engine_mutex_;
  std::unique_ptr<CopyEngine> engine_;
};

}  // namespace kvpage
