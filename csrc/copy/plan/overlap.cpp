#include "copy/plan/overlap.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvpage {
namespace {

// Returns whether the regions [first, last), which reach into each other, share no byte. That is certain when they do
// not meet on a circle as long as their common step.
bool interleave(std::vector<Region>::iterator first, std::vector<Region>::iterator last) {
  const int64_t step =
      std::max_element(first, last, [](const Region& a, const Region& b) { return a.step < b.step; })->step;
  if (step <= 0) return false;
  const Address origin = first->begin;
  auto offset = [&](const Region& region) { return static_cast<int64_t>((region.begin - origin) % step); };
  if (std::any_of(first, last, [&](const Region& r) { return r.count > 1 && r.step != step; })) return false;
  std::sort(first, last, [&](const Region& a, const Region& b) { return offset(a) < offset(b); });
  for (auto region = first; region != last; ++region) {
    const bool is_last = region + 1 == last;
    if (offset(*region) + region->bytes > (is_last ? step : offset(*(region + 1)))) return false;
  }
  return true;
}

}  // namespace

std::vector<Region> source_regions(const std::vector<Fragment>& fragments, int64_t num_blocks) {
  std::vector<Region> regions;
  if (num_blocks == 0) return regions;
  for (const Fragment& each : fragments) regions.push_back({each.src, each.bytes, each.src_step, num_blocks});
  return regions;
}

std::vector<Region> target_regions(const std::vector<Fragment>& fragments, int64_t num_blocks) {
  std::vector<Region> regions;
  if (num_blocks == 0) return regions;
  for (const Fragment& each : fragments) regions.push_back({each.dst, each.bytes, each.dst_step, num_blocks});
  return regions;
}

bool are_disjoint(std::vector<Region> regions) {
  for (Region& region : regions) {
    if (region.count == 1) region.step = 0;  // the stride of a dimension of size 1 means nothing
  }
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (auto first = regions.begin(); first != regions.end();) {
    Address end = first->end();
    auto last = first + 1;
    while (last != regions.end() && last->begin < end) end = std::max(end, (last++)->end());
    const bool single = last - first == 1 && first->count == 1;
    if (!single && !interleave(first, last)) return false;
    first = last;
  }
  return true;
}

bool ranges_meet(const std::vector<Region>& a, const std::vector<Region>& b) {
  auto range = [](const std::vector<Region>& all) {
    Address begin = std::numeric_limits<Address>::max(), end = 0;
    for (const Region& region : all) begin = std::min(begin, region.begin), end = std::max(end, region.end());
    return std::pair(begin, end);
  };
  if (a.empty() || b.empty()) return false;
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

}  // namespace kvpage
