// threads SEED NUM_OPERATIONS: what is promised to be safe between threads, by four of them at once. Memory is plain:
// that a block is written by one thread and read by another must be ordered by the calls of the library alone, or the
// sanitizer reports it. Prints figures as JSON.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/parallel.h"
#include "copy/copier/block_copier.h"
#include "slots/slot_tree.h"
#include "tree/prefix_tree.h"
#include "trial.h"

using namespace kvpage;

namespace {

constexpr int kNumThreads = 4;
constexpr int64_t kBlockSize = 2;
using Ids = std::vector<int32_t>;
using Tokens = std::vector<int32_t>;

void run_threads(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumThreads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

TokenView view(const Tokens& tokens) { return {tokens.data(), static_cast<int64_t>(tokens.size())}; }

// Says whose K and V: of the first `num_tokens` tokens.
uint64_t content(const Tokens& tokens, int64_t num_tokens) {
  uint64_t found = static_cast<uint64_t>(num_tokens);
  for (int64_t i = 0; i < num_tokens; ++i)
    found = (found + static_cast<uint64_t>(tokens[i]) + 1) * 0x9e3779b97f4a7c15ull;
  return found;
}

// --- pool and tree ---

struct SharedTree {
  SharedTree(int64_t num_blocks, int64_t num_host_blocks)
      : pool(std::make_shared<BlockPool>(num_blocks)),
        host_pool(num_host_blocks ? std::make_shared<BlockPool>(num_host_blocks) : nullptr),
        tree(std::make_shared<PrefixTree>(pool, kBlockSize, host_pool)),
        memory(static_cast<size_t>(num_blocks)) {}

  std::shared_ptr<BlockPool> pool, host_pool;
  std::shared_ptr<PrefixTree> tree;
  std::vector<uint64_t> memory;  // by device block
};

// What one thread of a server does: finds a prefix, computes the rest, caches it, goes on.
class Server {
 public:
  Server(SharedTree& shared, uint64_t seed) : shared_(shared), rng_(seed) {}

  void serve() {
    Tokens tokens(static_cast<size_t>(1 + rng_.below(6 * kBlockSize)));
    for (int32_t& token : tokens) token = static_cast<int32_t>(rng_.chance(80) ? 0 : rng_.below(4));
    const int priority = rng_.chance(80) ? 0 : 3;
    Match match = shared_.tree->match(view(tokens), "", priority);
    if (shared_.host_pool) prepare(match);
    const int64_t num_blocks = static_cast<int64_t>(tokens.size()) / kBlockSize, num_found = match.num_blocks();
    check_contents(match, tokens);
    Ids ids(static_cast<size_t>(std::max<int64_t>(num_blocks - num_found, 0)));
    if (!take(ids)) return shared_.tree->release(match);
    if (rng_.chance(20)) share(ids);
    for (size_t i = 0; i < ids.size(); ++i)
      memory(ids[i]) = content(tokens, (num_found + static_cast<int64_t>(i) + 1) * kBlockSize);
    const auto begin = static_cast<size_t>(num_found * kBlockSize);
    const Tokens rest(tokens.begin() + static_cast<int64_t>(begin),
                      tokens.begin() + static_cast<int64_t>(begin + ids.size() * kBlockSize));
    Match made = shared_.tree->insert(view(rest), ids, "", &match);
    check_contents(made, tokens);
    also(made);
    shared_.tree->release(made);
  }

 private:
  uint64_t& memory(int32_t id) { return shared_.memory[static_cast<size_t>(id)]; }

  // With a host tier nobody writes the copies down: only the device's part is used.
  void prepare(Match& match) {
    if (rng_.chance(10)) shared_.tree->write_out(match, 0);
    shared_.tree->trim(match);
  }

  bool take(Ids& ids) {
    for (int tries = 0; tries < 3; ++tries) {
      if (outcome_of([&] { shared_.pool->allocate(ids); }) == Outcome::kDone) return true;
      const auto count = static_cast<int64_t>(ids.size());
      shared_.host_pool ? static_cast<void>(shared_.tree->demote(count))
                        : static_cast<void>(shared_.tree->evict(count));
    }
    return false;
  }

  // As a fork does.
  void share(const Ids& ids) {
    shared_.pool->share(ids);
    for (int32_t id : ids) expect(shared_.pool->ref_count(id) == 2, "a block has another's references");
    shared_.pool->release(ids);
  }

  // A prefix that was promoted from a host block nobody has written is nobody's.
  void check_contents(const Match& match, const Tokens& tokens) {
    Ids ids(static_cast<size_t>(match.num_blocks()));
    shared_.tree->copy_block_ids(match, 0, ids);
    for (size_t i = 0; i < ids.size(); ++i)
      expect(memory(ids[i]) == content(tokens, static_cast<int64_t>(i + 1) * kBlockSize),
             "a match names another's block");
  }

  void also(const Match& match) {
    if (rng_.chance(90)) return;
    Match second = shared_.tree->pin(match);
    shared_.tree->release(second);
    if (rng_.chance(10)) shared_.tree->check_invariants(std::nullopt);
    if (rng_.chance(10)) shared_.pool->check_invariants();
    if (rng_.chance(5)) shared_.tree->clear();
    shared_.tree->evict_host(rng_.below(3));
    ask(match);
  }

  void ask(const Match& match) {
    const PrefixTree& tree = *shared_.tree;
    const int64_t num_blocks = shared_.pool->num_blocks();
    expect(shared_.pool->num_free() + match.num_blocks() <= num_blocks, "a pinned block is free");
    expect(tree.num_cached() >= match.num_blocks() && tree.num_cached() <= num_blocks, "a pinned block is not cached");
    expect(tree.num_evictable() + match.num_blocks() <= num_blocks, "a pinned block is evictable");
    expect(tree.num_matches() > 0 && !tree.is_released(match), "a live match is released");
    for (const TreeEntry& entry : tree.entries(rng_.below(9)))
      expect(!entry.tokens.empty() && entry.tokens.size() % kBlockSize == 0 &&
                 entry.device_ids.size() <= entry.tokens.size() / kBlockSize,
             "an entry is not of whole blocks");
    for (const HotPrefix& prefix : tree.hottest(rng_.below(9), 2))
      expect(prefix.num_tokens > 0 && prefix.num_tokens % kBlockSize == 0 && prefix.first_tokens.size() <= 2,
             "a hot prefix is not of whole blocks");
    expect(tree.num_nodes() <= num_blocks + tree.num_host_cached() + tree.num_host_evictable() + 20, "too many nodes");
  }

  SharedTree& shared_;
  Random rng_;
};

void serve_tree(int64_t num_host_blocks, uint64_t seed, int64_t num_operations) {
  SharedTree shared(24, num_host_blocks);
  run_threads([&](int thread) {
    Server server(shared, seed + static_cast<uint64_t>(thread));
    for (int64_t i = 0; i < num_operations / kNumThreads; ++i) server.serve();
  });
  shared.tree->check_invariants(Ids());
  shared.tree->clear();
  expect(shared.pool->num_free() == shared.pool->num_blocks(), "blocks are lost");
  if (num_host_blocks) expect(shared.host_pool->num_free() == num_host_blocks, "host blocks are lost");
}

// --- slots ---

void serve_slots(uint64_t seed, int64_t num_operations) {
  SlotAllocator allocator(16);
  SlotTree tree(60);
  std::array<int64_t, 16> owners{};  // plain: a slot is one thread's
  run_threads([&](int thread) {
    Random rng(seed + static_cast<uint64_t>(thread));
    for (int64_t i = 0; i < num_operations / kNumThreads; ++i) {
      Tokens tokens(static_cast<size_t>(1 + rng.below(8)));
      for (int32_t& token : tokens) token = static_cast<int32_t>(rng.chance(70) ? 0 : rng.below(3));
      const SlotMatch found = tree.pin(view(tokens), &allocator);
      Tokens prefix(tokens.begin(), tokens.begin() + found.num_tokens);
      tree.release(view(prefix));
      const int64_t slot = allocator.alloc();
      if (slot < 0) continue;
      const int64_t own = owners[static_cast<size_t>(slot)] = thread * num_operations + i;
      tree.insert(view(tokens), slot, allocator.version(slot));
      if (rng.chance(50)) tree.find(view(tokens), nullptr);
      if (rng.chance(10))
        expect(tree.num_pins() > 0 && tree.num_slots() <= 16 && tree.num_over() <= tree.num_tokens() + 60 &&
                   tree.num_nodes() > 0,
               "a pinned sequence is not there");
      if (rng.chance(30)) tree.withdraw(slot);
      tree.release(view(tokens));
      expect(owners[static_cast<size_t>(slot)] == own && !allocator.is_free(slot) && allocator.free_count() < 16,
             "a slot was given out twice");
      allocator.free(slot);
    }
  });
  tree.check_invariants();
  expect(allocator.free_count() == 16 && tree.num_pins() == 0, "slots or pins are lost");
}

// --- copies ---

struct Cache {
  explicit Cache(int64_t num_blocks_) : num_blocks(num_blocks_), memory(static_cast<size_t>(2 * num_blocks * kBytes)) {}

  // Two layers of blocks of 512 KiB: the caller's threads are worth starting.
  CacheView view() {
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    const auto layer = static_cast<Address>(num_blocks * kBytes);
    return {{{address, {kBytes, 1}}, {address + layer, {kBytes, 1}}}, num_blocks};
  }
  static BlockShape shape() { return {{1, kBytes}, 0, 1}; }

  static constexpr int64_t kBytes = int64_t{1} << 19;
  int64_t num_blocks;
  std::vector<std::byte> memory;
};

// Each thread copies blocks to blocks of its own, through one copier.
void copy_blocks(uint64_t seed, int64_t num_operations) {
  constexpr int64_t kEach = 3;
  Cache src(kNumThreads * kEach), dst(kNumThreads * kEach);
  Random bytes(seed);
  for (std::byte& each : src.memory) each = static_cast<std::byte>(bytes.next());
  BlockCopier copier({Cache::shape()}, src.view(), dst.view(), {kHost, kHost, false}, {0, 1});
  run_threads([&](int thread) {
    Random rng(seed + static_cast<uint64_t>(thread));
    for (int64_t i = 0; i < num_operations / kNumThreads; ++i) {
      std::vector<int64_t> pairs;
      for (int64_t block = 0; block < kEach; ++block)
        pairs.insert(pairs.end(), {rng.below(src.num_blocks), thread * kEach + block});
      copier.run(pairs.data(), kEach, 0, 3);
      for (int64_t block = 0; block < kEach; ++block)
        for (int64_t layer = 0; layer < 2; ++layer) {
          const int64_t base = layer * src.num_blocks;
          expect(std::memcmp(src.memory.data() + (base + pairs[2 * block]) * Cache::kBytes,
                             dst.memory.data() + (base + pairs[2 * block + 1]) * Cache::kBytes, Cache::kBytes) == 0,
                 "a block was not copied");
        }
    }
  });
}

// Every item once, by whatever thread; what throws is thrown to the caller after all have ended.
void share_work(uint64_t seed, int64_t num_operations) {
  run_threads([&](int thread) {
    Random rng(seed + static_cast<uint64_t>(thread));
    for (int64_t i = 0; i < num_operations / kNumThreads; ++i) {
      std::vector<int> counts(static_cast<size_t>(rng.below(100)));
      parallel_for(static_cast<int64_t>(counts.size()), 1 + static_cast<int>(rng.below(4)),
                   [&](int64_t begin, int64_t end) {
                     for (; begin < end; ++begin) ++counts[static_cast<size_t>(begin)];
                   });
      expect(std::count(counts.begin(), counts.end(), 1) == static_cast<int64_t>(counts.size()),
             "an item was left out");
      std::atomic<int> num_done = 0;
      const Outcome found = outcome_of([&] {
        run_shares(3, [&](int share) {
          ++num_done;
          check(share != 1, "share must not be 1");
        });
      });
      expect(found == Outcome::kRefused && num_done == 3, "an exception was lost");
    }
  });
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10) << 32;
  const int64_t num_operations = std::atoll(arguments[2]);
  try {
    serve_tree(0, seed, num_operations * 45 / 100);
    serve_tree(20, seed + 100, num_operations * 25 / 100);
    serve_slots(seed + 200, num_operations * 29 / 100);
    share_work(seed + 300, num_operations / 1000);
    copy_blocks(seed + 400, std::min<int64_t>(num_operations / 1000, 60));
  } catch (const std::exception& error) {
    std::cerr << "seed " << seed << ": " << error.what() << std::endl;
    return 1;
  }
  std::cout << figures_json({{"operations", num_operations}}) << std::endl;
}
