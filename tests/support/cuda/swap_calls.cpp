// Swaps of random blocks between host and device through BlockCopier, with the fake runtime: prints what one call asks
// of CUDA, what it allocates, and with rounds the median of its nanoseconds.
//
//   swap_calls engine|each|kernel even|uneven NUM_BLOCKS NUM_LAYERS [ROUNDS]       each: a driver without batched
//   copies
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "copy/copier/block_copier.h"
#include "fake_runtime.h"

namespace {
uint64_t num_allocations = 0;
}

void* operator new(size_t bytes) {
  ++num_allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr int64_t kBytes = 32 << 10;  // of K, or of V, of a block in a layer
constexpr int64_t kPool = 4096;       // blocks of a side

// Layers apart from each other, each [2, kPool, kBytes]: K's and V's parts of a block are two extents. With `uneven`
// each layer's blocks are farther apart than those of the one before.
kvpage::CacheView view(kvpage::Address base, int64_t num_layers, bool uneven) {
  kvpage::CacheView found{{}, kPool};
  kvpage::Address address = base;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const int64_t step = kBytes + (uneven ? 512 * layer : 0);
    found.layers.push_back({address, {kPool * step, step, 1}});
    address += 2 * kPool * step + 4096;
  }
  return found;
}

std::vector<int64_t> pairs_of(int64_t num_blocks) {
  std::vector<int64_t> srcs(kPool), dsts(kPool), pairs;
  std::iota(srcs.begin(), srcs.end(), 0), std::iota(dsts.begin(), dsts.end(), 0);
  std::mt19937 random(7);
  std::shuffle(srcs.begin(), srcs.end(), random), std::shuffle(dsts.begin(), dsts.end(), random);
  for (int64_t i = 0; i < num_blocks; ++i) pairs.insert(pairs.end(), {srcs[i], dsts[i]});
  return pairs;
}

double median_ns(kvpage::BlockCopier& copier, const std::vector<int64_t>& pairs, int rounds) {
  std::vector<double> taken;
  for (int round = 0; round < rounds; ++round) {
    const auto before = std::chrono::steady_clock::now();
    copier.run(pairs.data(), static_cast<int64_t>(pairs.size() / 2), 8, 1);
    taken.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - before).count());
  }
  std::nth_element(taken.begin(), taken.begin() + rounds / 2, taken.end());
  return taken[rounds / 2];
}

// Whether the fake was given the plan's own extents, in the plan's order.
bool asked_for(const kvpage::BlockCopier& copier, const std::vector<int64_t>& pairs) {
  const kvpage::CopyPlan plan(copier.geometry(), pairs.data(), static_cast<int64_t>(pairs.size() / 2));
  std::vector<FakeExtent> wanted;
  plan.for_each(0, plan.num_bytes(), [&](kvpage::Address src, kvpage::Address dst, int64_t bytes) {
    wanted.push_back({src, dst, static_cast<size_t>(bytes)});
  });
  return wanted == fake_calls.extents;
}

}  // namespace

int main(int num_arguments, char** arguments) {
  if (num_arguments < 5) return 2;
  const bool kernel = !std::strcmp(arguments[1], "kernel"), uneven = !std::strcmp(arguments[2], "uneven");
  const int64_t num_blocks = std::atoll(arguments[3]), num_layers = std::atoll(arguments[4]);
  const int rounds = num_arguments > 5 ? std::atoi(arguments[5]) : 0;
  fake_batches = std::strcmp(arguments[1], "each") != 0;
  kvpage::BlockCopier copier({{{2, 1, kBytes}, 1, 1}}, view(uint64_t{1} << 40, num_layers, false),
                             view(uint64_t{1} << 44, num_layers, uneven), {0, -1, true},
                             {kernel ? int64_t{1} << 40 : 0, 16});
  const std::vector<int64_t> pairs = pairs_of(num_blocks);
  fake_keeps = false;
  copier.run(pairs.data(), num_blocks, 8, 1);  // its arrays grow once
  uint64_t allocations = num_allocations;
  copier.run(pairs.data(), num_blocks, 8, 1);
  allocations = num_allocations - allocations;
  const double ns = rounds ? median_ns(copier, pairs, rounds) : 0;
  fake_keeps = true, fake_calls = {};
  copier.run(pairs.data(), num_blocks, 8, 1);
  std::printf("{\"launches\": %d, \"threads\": %d, \"batches\": %d, \"copies\": %d, \"flags\": %d, ",
              int(fake_calls.launches), int(fake_calls.threads), int(fake_calls.batches), int(fake_calls.copies),
              int(fake_calls.flags));
  std::printf("\"extents\": %d, \"as_planned\": %s, \"allocations\": %d, \"median_ns\": %.0f}\n",
              int(fake_calls.extents.size()), asked_for(copier, pairs) ? "true" : "false", int(allocations), ns);
}
