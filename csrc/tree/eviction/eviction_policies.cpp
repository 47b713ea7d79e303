#include "tree/eviction/eviction_policies.h"

#include "base/check.h"
#include "tree/eviction/cost_policy.h"
#include "tree/eviction/slru_policy.h"

namespace kvpage {

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, int64_t num_blocks, int64_t block_size) {
  if (name == "slru") return std::make_unique<SlruPolicy>();
  if (name == "cost") return std::make_unique<CostPolicy>(num_blocks, block_size);
  check(name == "lru", "eviction must be lru, slru or cost, got ", name);
  return nullptr;
}

}  // namespace kvpage
