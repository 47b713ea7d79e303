#include "pool/eviction/cost_policy.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvpage {
namespace {

constexpr double kNanosPerTick = 1e6;      // ages are in milliseconds
constexpr double kPrior = 0.1;             // evidence for least recently used, as a part of the window
constexpr double kEvenDepth = 131'072;  // tokens before a block, from which on attention costs as much as all else

double begin_of(int age) { return std::exp2(0.5 * age); }

// A place among the ages, with a fraction.
double place_of(double age) { return 2 * std::log2(std::max(age, 1.0)); }

}  // namespace

EvictionCosts EvictionCosts::by_depth(int64_t num_blocks, int64_t block_size) {
  EvictionCosts costs{.of_kind = {}, .size = num_blocks};
  costs.of_kind.fill(1.0);
  for (int kind = 1; kind < kNumKinds; ++kind)
    costs.of_kind[static_cast<size_t>(kind)] +=
        std::exp2(2 * (kind - 1)) * static_cast<double>(block_size) / kEvenDepth;
  return costs;
}

int EvictionCosts::kind_of_depth(int64_t num_blocks_before) {
  const int num_bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(num_blocks_before)));
  return std::min(kNumKinds - 1, (num_bits + 1) / 2);  // four times as deep as the one before
}

EvictionCosts EvictionCosts::equal() {
  EvictionCosts costs;
  costs.of_kind.fill(1.0);
  return costs;
}

CostPolicy::CostPolicy(const EvictionCosts& costs) : costs_(costs) { learn(); }

int CostPolicy::class_of(const EvictionFacts& entry) const {
  if (entry.next_use > 0) return kNumLearned + entry.cost_kind;
  return entry.cost_kind * kNumHits + static_cast<int>(std::min<int64_t>(entry.num_hits, kNumHits - 1));
}

int64_t CostPolicy::key_of(const EvictionFacts& entry) const {
  return entry.next_use > 0 ? entry.next_use : entry.used_at;
}

double CostPolicy::worth(const EvictionFacts& entry, int64_t now) const {
  const int kind = entry.rank_class;
  const double cost = costs_.of_kind[static_cast<size_t>(kind < kNumLearned ? kind / kNumHits : kind - kNumLearned)];
  if (entry.next_use == 0) return cost * learned(kind, age_of(entry, now));
  const double distance = std::abs(static_cast<double>(entry.next_use - now)) / kNanosPerTick;
  return cost / std::max(distance, 1.0);
}

double CostPolicy::learned(int kind, double age) const {
  const double place = std::min(place_of(age), kNumAges - 1.001);
  const auto bucket = static_cast<size_t>(place);
  const double part = place - static_cast<double>(bucket);
  const Ages& worth = worth_[static_cast<size_t>(kind)];
  return worth[bucket] * (1 - part) + worth[bucket + 1] * part;
}

double CostPolicy::age_of(const EvictionFacts& entry, int64_t now) {
  return static_cast<double>(std::max<int64_t>(now - entry.used_at, 0)) / kNanosPerTick;
}

void CostPolicy::reused(const EvictionFacts& entry, int64_t size, int64_t now) noexcept {
  count(&hits_, entry, size, now);
}

void CostPolicy::forgotten(const EvictionFacts& entry, int64_t size, int64_t now) noexcept {
  count(&gone_, entry, size, now);
}

void CostPolicy::listed(const EvictionFacts&, int64_t size) noexcept { size_listed_ += size; }

void CostPolicy::count(std::array<Ages, kNumLearned>* events, const EvictionFacts& entry, int64_t size,
                       int64_t now) noexcept {
  if (entry.next_use > 0) return;
  const auto age = static_cast<size_t>(std::min(place_of(age_of(entry, now)), kNumAges - 1.0));
  (*events)[static_cast<size_t>(entry.rank_class)][age] += static_cast<double>(size);
  counted_ += static_cast<double>(size);
  if (counted_ >= window_) learn();
}

// From the highest age down: `time` is what all that reaches an age lies there after it.
void CostPolicy::learn() noexcept {
  const int64_t size = costs_.size == EvictionCosts::kAsListed ? size_listed_ : costs_.size;
  window_ = 4.0 * static_cast<double>(size) + 1024;
  const double prior = kPrior * window_;
  for (size_t kind = 0; kind < kNumLearned; ++kind) {
    double num_hits = 0, num_ended = 0, time = 0;
    for (int age = kNumAges; age-- > 0;) {
      const auto i = static_cast<size_t>(age);
      const double span = begin_of(age + 1) - begin_of(age);
      double &hits = hits_[kind][i], &gone = gone_[kind][i];
      time += span * (num_ended + (hits + gone) / 2);
      num_hits += hits;
      num_ended += hits + gone;
      worth_[kind][i] = (num_hits + prior) / (time + prior * 4 * begin_of(age));
      hits /= 2;
      gone /= 2;
    }
  }
  counted_ = 0;
}

}  // namespace kvpage
