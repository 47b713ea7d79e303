// The policies by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "tree/eviction/eviction_policy.h"

namespace kvpage {

// Null for "lru", which EvictionOrder serves by itself. InvalidArgument for a name that is not lru, slru or cost.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, int64_t num_blocks, int64_t block_size);

}  // namespace kvpage
