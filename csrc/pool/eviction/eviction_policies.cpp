#include "pool/eviction/eviction_policies.h"

#include "base/check.h"
#include "pool/eviction/plain_policies.h"
#include "pool/eviction/slru_policy.h"

namespace kvpage {
namespace {

template <typename Policy>
std::unique_ptr<EvictionPolicy> make(const EvictionCosts&) {
  return std::make_unique<Policy>();
}

struct Entry {
  const char* name;
  std::unique_ptr<EvictionPolicy> (*make)(const EvictionCosts&);
};

constexpr Entry kPolicies[] = {
    {"lru", make<LruPolicy>},
    {"slru", make<SlruPolicy>},
    {"lfu", make<LfuPolicy>},
    {"fifo", make<FifoPolicy>},
    {"cost",
     [](const EvictionCosts& costs) -> std::unique_ptr<EvictionPolicy> { return std::make_unique<CostPolicy>(costs); }},
};

}  // namespace

std::vector<std::string> eviction_policies() {
  std::vector<std::string> names;
  for (const Entry& policy : kPolicies) names.emplace_back(policy.name);
  return names;
}

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, const char* option,
                                                     const EvictionCosts& costs) {
  std::string names;
  for (const Entry& policy : kPolicies) {
    if (policy.name == name) return policy.make(costs);
    names += (names.empty() ? "" : ", ") + std::string(policy.name);
  }
  fail(option, " must be one of ", names, ", got '", name, "'");
}

}  // namespace kvpage
