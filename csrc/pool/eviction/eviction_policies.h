// The policies by name: the one list of them, for trees and for the tiers of a store.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pool/eviction/cost_policy.h"
#include "pool/eviction/eviction_policy.h"

namespace kvpage {

// In the order in which messages name them; the first one is the default.
std::vector<std::string> eviction_policies();

// InvalidArgument for another name; `option` is what the caller names the policy by.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, const char* option,
                                                     const EvictionCosts& costs);

}  // namespace kvpage
