#include "tree/eviction/cost_policy.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvpage {
namespace {

constexpr double kNanosPerTick = 1e6;      // ages are in milliseconds
constexpr double kPrior = 0.1;             // blocks of evidence for least recently used, as a part of the window
constexpr double kEvenDepth = 131'072;  // tokens before a block, from which on attention costs as much as all else

double begin_of(int age) { return std::exp2(0.5 * age); }

// A place among the ages, with a fraction.
double place_of(double age) { return 2 * std::log2(std::max(age, 1.0)); }

}  // namespace

CostPolicy::CostPolicy(int64_t num_blocks, int64_t block_size)
    : num_window_(4.0 * static_cast<double>(num_blocks) + 1024) {
  cost_.fill(1.0);
  for (int kind = 1; kind < kNumDepths; ++kind)
    cost_[static_cast<size_t>(kind)] += std::exp2(2 * (kind - 1)) * static_cast<double>(block_size) / kEvenDepth;
  learn();
}

int CostPolicy::class_of(const TreeNode& node) const {
  const int num_bits = static_cast<int>(std::bit_width(static_cast<uint32_t>(node.start)));
  const int kind = std::min(kNumDepths - 1, (num_bits + 1) / 2);  // four times as deep as the one before
  return node.next_use > 0 ? kNumLearned + kind : kind * kNumHits + std::min(node.num_hits, kNumHits - 1);
}

double CostPolicy::worth(const TreeNode& node, int64_t now) const {
  const int kind = node.rank_class;
  const double cost = cost_[static_cast<size_t>(kind < kNumLearned ? kind / kNumHits : kind - kNumLearned)];
  if (node.next_use == 0) return cost * learned(kind, age_of(node, now));
  const double distance = std::abs(static_cast<double>(node.next_use - now)) / kNanosPerTick;
  return cost / std::max(distance, 1.0);
}

double CostPolicy::learned(int kind, double age) const {
  const double place = std::min(place_of(age), kNumAges - 1.001);
  const auto bucket = static_cast<size_t>(place);
  const double part = place - static_cast<double>(bucket);
  const Ages& worth = worth_[static_cast<size_t>(kind)];
  return worth[bucket] * (1 - part) + worth[bucket + 1] * part;
}

double CostPolicy::age_of(const TreeNode& node, int64_t now) {
  return static_cast<double>(std::max<int64_t>(now - static_cast<int64_t>(node.used_at), 0)) / kNanosPerTick;
}

void CostPolicy::reused(const TreeNode& node, int64_t now) noexcept { count(&hits_, node, node.num_blocks, now); }

void CostPolicy::forgotten(const TreeNode& node, int64_t num_blocks, int64_t now) noexcept {
  count(&gone_, node, num_blocks, now);
}

void CostPolicy::count(std::array<Ages, kNumLearned>* events, const TreeNode& node, int64_t num_blocks,
                       int64_t now) noexcept {
  if (node.next_use > 0) return;
  const auto age = static_cast<size_t>(std::min(place_of(age_of(node, now)), kNumAges - 1.0));
  (*events)[node.rank_class][age] += static_cast<double>(num_blocks);
  num_counted_ += static_cast<double>(num_blocks);
  if (num_counted_ >= num_window_) learn();
}

// From the highest age down: `time` is what all blocks that reach an age lie there after it.
void CostPolicy::learn() noexcept {
  const double prior = kPrior * num_window_;
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
  num_counted_ = 0;
}

}  // namespace kvpage
