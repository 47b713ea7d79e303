#include "copy/sm_kernel/kernel_on_host.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "copy/sm_kernel/launch_plan.h"

namespace kvpage {
namespace {

template <typename Vector>
void run_kernel(const CopyParams& params, int64_t max_threads) {
  const int64_t num_threads = std::min(launch_threads(params.num_units, kMostGroups), max_threads);
  for (int64_t thread = 0; thread < num_threads; ++thread) copy_thread<Vector>(params, thread, num_threads);
}

}  // namespace

void run_copy_kernel_on_host(const CopyPlan& plan, int64_t vector_bytes, int64_t max_threads, int64_t capacity) {
  check(max_threads > 0 && max_threads % kLanes == 0, "max_threads must be a positive multiple of ", kLanes, ", got ",
        max_threads);
  check(vector_bytes > 0 && plan_vector_bytes(plan) % vector_bytes == 0, "vector_bytes must divide ",
        plan_vector_bytes(plan), ", got ", vector_bytes);
  constexpr int64_t kLeast = 2 * (sizeof(Fragment) + sizeof(BlockPair));
  check(capacity >= kLeast, "capacity must be at least ", kLeast, " bytes, got ", capacity);
  const std::vector<Fragment>& fragments = plan.geometry().fragments();
  for (const CopyTile& tile : split_for_launches(fragments.size(), plan.pairs().size(), capacity)) {
    const CopyParams params = copy_params(plan, tile, fragments.data() + tile.first_fragment,
                                          plan.pairs().data() + tile.first_pair, vector_bytes);
    dispatch_vector(vector_bytes, [&](auto vector) { run_kernel<decltype(vector)>(params, max_threads); });
  }
}

}  // namespace kvpage
