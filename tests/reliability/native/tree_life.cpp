#include "tree_life.h"

#include <algorithm>
#include <array>
#include <string_view>

using kvpage::Match;
using kvpage::TierPair;
using kvpage::TokenView;

namespace {

constexpr std::array<std::string_view, 3> kNames = {"", "lora", "a name that is too long to stand in a string itself"};
constexpr uint64_t kPoison = 0xdeadull << 48;
constexpr size_t kMostMatches = 6;

// The same tokens in either width; wide where one does not fit.
struct Passed {
  Passed(const Tokens& tokens, bool is_wide) : wide(tokens) {
    for (int64_t token : tokens) {
      narrow.push_back(static_cast<int32_t>(token));
      is_wide |= token != narrow.back();
    }
    if (is_wide) narrow.clear();
    is_narrow = !is_wide;
  }
  TokenView view() const {
    const auto size = static_cast<int64_t>(wide.size());
    return is_narrow ? TokenView(narrow.data(), size) : TokenView(wide.data(), size);
  }
  std::vector<int32_t> narrow;
  Tokens wide;
  bool is_narrow;
};

}  // namespace

TreeLife::TreeLife(const TreeWorld& world, uint64_t seed, Figures* figures)
    : Life(seed, figures),
      world_(world),
      pool_(std::make_shared<kvpage::BlockPool>(world.num_blocks)),
      host_pool_(world.num_host_blocks ? std::make_shared<kvpage::BlockPool>(world.num_host_blocks) : nullptr),
      tree_(std::make_shared<kvpage::PrefixTree>(
          pool_, world.block_size, host_pool_,
          world.hash_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << world.hash_bits) - 1)),
      naive_pool_(world.num_blocks),
      naive_(&naive_pool_, world.block_size, world.num_host_blocks),
      device_memory_(static_cast<size_t>(world.num_blocks), kPoison),
      host_memory_(static_cast<size_t>(world.num_host_blocks), kPoison),
      host_number_(host_memory_.size()) {}

void TreeLife::step() {
  using Operation = void (TreeLife::*)();
  struct Choice {
    int64_t weight;
    Operation operation;
  };
  static constexpr std::array<Choice, 17> kChoices = {{{4, &TreeLife::allocate},
                                                       {1, &TreeLife::share},
                                                       {3, &TreeLife::release_ids},
                                                       {5, &TreeLife::match},
                                                       {2, &TreeLife::match_part},
                                                       {1, &TreeLife::pin},
                                                       {4, &TreeLife::release},
                                                       {1, &TreeLife::trim},
                                                       {3, &TreeLife::promote},
                                                       {1, &TreeLife::write_out},
                                                       {9, &TreeLife::insert},
                                                       {1, &TreeLife::evict},
                                                       {5, &TreeLife::demote},
                                                       {1, &TreeLife::evict_host},
                                                       {1, &TreeLife::drop},
                                                       {1, &TreeLife::clear},
                                                       {2, &TreeLife::companions}}};
  int64_t at = rng.below(45);
  for (const Choice& choice : kChoices)
    if ((at -= choice.weight) < 0) return (this->*choice.operation)();
}

// --- what operations are made of ---

Tokens TreeLife::tokens(int64_t count) {
  Tokens made(static_cast<size_t>(count));
  const bool is_skewed = world_.num_symbols == 2;
  for (int64_t& token : made) token = is_skewed ? rng.chance(15) : rng.below(world_.num_symbols) - 1;
  if (count > 0 && rng.chance(2)) rng.one_of(made) += int64_t{1} << 32;
  return made;
}

// Mostly owned and distinct, sometimes anything.
Ids TreeLife::some_ids(int64_t count) {
  Ids ids;
  const bool is_any = rng.chance(3);
  for (int64_t i = 0; i < count; ++i) {
    if (is_any) {
      ids.push_back(static_cast<int32_t>(rng.below(world_.num_blocks + 3) - 1));
    } else if (!owned_.empty()) {
      const int32_t id = rng.one_of(owned_);
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

int64_t TreeLife::some_priority() { return rng.chance(70) ? 0 : rng.chance(5) ? 8 : rng.below(8); }

TreeLife::Held* TreeLife::some_match() { return matches_.empty() ? nullptr : &rng.one_of(matches_); }

void TreeLife::keep(Match real, NaiveMatch naive) {
  matches_.push_back({std::move(real), std::move(naive)});
  compare_path(matches_.back());
  while (matches_.size() > kMostMatches) release();
}

void TreeLife::own(const Ids& ids) {
  owned_.insert(owned_.end(), ids.begin(), ids.end());
  for (int32_t id : ids) device_memory_[static_cast<size_t>(id)] = kPoison | static_cast<uint64_t>(id);
}

void TreeLife::disown(const Ids& ids) {
  for (int32_t id : ids)
    if (const auto found = std::find(owned_.begin(), owned_.end(), id); found != owned_.end()) owned_.erase(found);
}

// --- the pool ---

// Seldom more than there are: refusals are slow.
void TreeLife::allocate() {
  const int64_t count = rng.below(6);
  const auto num_free = static_cast<int64_t>(naive_pool_.free.size());
  allocate(rng.chance(90) ? std::min(count, num_free) : count);
}

void TreeLife::allocate(int64_t count) {
  Ids ids(static_cast<size_t>(count), kNone);
  const bool fits = count <= static_cast<int64_t>(naive_pool_.free.size());
  const Outcome found = outcome([&] { pool_->allocate(ids); });
  expect(found == (fits ? Outcome::kDone : Outcome::kOutOfBlocks), "allocate(", count, ") came to another end");
  if (!fits) return;
  expect(ids == naive_pool_.allocate(count), "allocate gave other blocks");
  own(ids);
}

void TreeLife::share() {
  const Ids ids = some_ids(rng.below(3));
  const bool can = naive_pool_.can_share(ids);
  expect((outcome([&] { pool_->share(ids); }) == Outcome::kDone) == can, "share came to another end");
  if (!can) return;
  naive_pool_.share(ids);
  owned_.insert(owned_.end(), ids.begin(), ids.end());
}

void TreeLife::release_ids() {
  Ids ids = some_ids(rng.below(6));
  if (!ids.empty() && rng.chance(10)) ids.push_back(ids.front());
  const bool can = naive_pool_.can_release(ids);
  expect((outcome([&] { pool_->release(ids); }) == Outcome::kDone) == can, "release came to another end");
  if (!can) return;
  naive_pool_.release(ids);
  disown(ids);
}

// --- matches ---

void TreeLife::match() {
  const Passed passed(tokens(rng.below(world_.max_blocks * world_.block_size + 1)), rng.chance(50));
  const auto name = static_cast<int>(rng.below(3));
  const auto priority = static_cast<int>(some_priority());
  std::optional<Match> found;
  const Outcome came_to = outcome([&] { found = tree_->match(passed.view(), kNames[name], priority); });
  const bool can = naive_.can_match(name, passed.wide, priority);
  expect((came_to == Outcome::kDone) == can, "match came to another end");
  if (can) keep(std::move(*found), naive_.match(name, passed.wide, priority));
}

void TreeLife::match_part() {
  Held* held = some_match();
  if (!held) return;
  Tokens wanted = naive_.tokens_of(held->naive);
  for (int64_t token : tokens(rng.below(2 * world_.block_size + 1))) wanted.push_back(token);
  const Passed passed(wanted, rng.chance(50));
  auto part = call([&] { return tree_->match_part(held->real, passed.view()); });
  const int64_t longest = naive_.longest_part(held->naive, wanted);
  expect((part ? part->num_tokens : 0) == longest % world_.block_size, "match_part found a part of another length");
  if (!part) return;
  const uint64_t content = (part->is_on_device ? device_memory_ : host_memory_)[static_cast<size_t>(part->block_id)];
  const auto owner = std::find_if(naive_.blocks.begin(), naive_.blocks.end(),
                                  [&](const NaiveBlock& block) { return block.is_live && block.content == content; });
  const size_t start = held->naive.path.size() * static_cast<size_t>(world_.block_size);
  expect(owner != naive_.blocks.end(), "match_part found a block that is nobody's");
  expect(
      std::equal(owner->tokens.begin(), owner->tokens.begin() + longest, wanted.begin() + static_cast<int64_t>(start)),
      "match_part found a block of other tokens");
  naive_.touch(held->naive, static_cast<int>(owner - naive_.blocks.begin()), part->match.num_blocks());
  call([&] { tree_->release(part->match); });
}

void TreeLife::pin() {
  Held* held = some_match();
  if (!held) return;
  std::optional<Match> found;
  call([&] { found = tree_->pin(held->real); });
  keep(std::move(*found), naive_.pinned(held->naive.name, held->naive.path, held->naive.priority));
}

void TreeLife::release() {
  if (!matches_.empty()) release_at(static_cast<size_t>(rng.below(static_cast<int64_t>(matches_.size()))));
}

void TreeLife::release_at(size_t at) {
  Held held = std::move(matches_[at]);
  matches_.erase(matches_.begin() + static_cast<int64_t>(at));
  call([&] { tree_->release(held.real); });
  naive_.release(held.naive);
  if (rng.chance(95)) return;
  expect(outcome([&] { tree_->release(held.real); }) == Outcome::kRefused, "a match was released twice");
}

void TreeLife::trim() {
  Held* held = some_match();
  if (!held) return;
  call([&] { tree_->trim(held->real); });
  naive_.trim(held->naive);
  compare_path(*held);
}

// Blocks that have none get companions that no other block has. Those of blocks that are gone are free again.
void TreeLife::companions() {
  if (rng.chance(30)) {
    const auto num_dead = static_cast<int64_t>(tree_->dead_companions().size());
    expect(outcome_of([&] { tree_->free_companions(num_dead + 1); }) == Outcome::kRefused,
           "more than the dead are free");
    tree_->free_companions(rng.below(num_dead + 1));
  }
  Held* held = some_match();
  if (!held) return;
  const std::vector<int>& path = held->naive.path;
  const auto size = static_cast<int64_t>(path.size());
  const int64_t end = rng.below(size + 1), start = rng.below(end + 1);
  call([&] { tree_->give_companions(held->real, start, end); });
  Ids rows(static_cast<size_t>(3 * size));
  tree_->copy_path(held->real, 0, rows);
  for (int64_t i = start; i < end; ++i) {
    NaiveBlock& block = naive_.blocks[path[i]];
    const int32_t companion = rows[2 * size + i];
    const bool is_new = block.companion == kNone;
    for (const NaiveBlock& other : naive_.blocks)
      expect(!is_new || !other.is_live || other.companion != companion, "two blocks have one companion");
    if (is_new) block.companion = companion;
    expect(companion != kNone, "a block was given no companion");
  }
}

// --- copies ---

void TreeLife::to_host(const std::vector<TierPair>& real, const std::vector<NaivePair>& naive) {
  for (const auto& [device, host] : real)
    host_memory_[static_cast<size_t>(host)] = device_memory_[static_cast<size_t>(device)];
  if (Allocations::of_this_thread().has_failed) return;  // fewer blocks may have been copied than the model thinks
  expect(real.size() == naive.size(), "other blocks go to the host: ", real.size(), " for ", naive.size());
  for (size_t i = 0; i < real.size(); ++i) {
    expect(real[i].first == naive[i].first, "another block goes to the host");
    host_number_[static_cast<size_t>(real[i].second)] = naive[i].second;
  }
}

void TreeLife::to_device(const std::vector<TierPair>& real, const std::vector<NaivePair>& naive) {
  expect(real.size() == naive.size(), "other blocks come back: ", real.size(), " for ", naive.size());
  for (size_t i = 0; i < real.size(); ++i) {
    const auto [host, device] = real[i];
    device_memory_[static_cast<size_t>(device)] = host_memory_[static_cast<size_t>(host)];
    expect(host_number_[static_cast<size_t>(host)] == naive[i].first && device == naive[i].second,
           "another block comes back");
  }
}

void TreeLife::promote() {
  Held* held = some_match();
  if (!held) return;
  const int64_t num_host_only = static_cast<int64_t>(held->naive.path.size()) - naive_.on_device(held->naive.path);
  Ids ids = some_ids(rng.below(world_.max_blocks));
  if (rng.chance(90)) ids.resize(std::min(ids.size(), static_cast<size_t>(num_host_only)));
  std::vector<TierPair> pairs;
  const bool can = naive_.can_promote(held->naive, ids);
  expect((outcome([&] { pairs = tree_->promote(held->real, ids); }) == Outcome::kDone) == can,
         "promote came to another end");
  if (!can) return;
  disown(ids);
  to_device(pairs, naive_.promote(held->naive, ids));
}

void TreeLife::write_out() {
  Held* held = some_match();
  if (!held || !host_pool_) return;
  const auto pairs = call([&] { return tree_->write_out(held->real, 0); });
  to_host(pairs, naive_.write_out(held->naive));
}

// --- insertion ---

void TreeLife::insert() {
  Held* held = rng.chance(60) ? some_match() : nullptr;
  const int64_t num_blocks = rng.below(world_.max_blocks);
  const Passed passed(tokens(num_blocks * world_.block_size + rng.chance(3)), rng.chance(50));
  const auto name = held && rng.chance(97) ? 0 : static_cast<int>(rng.below(3));
  const auto priority = held && rng.chance(97) ? 0 : static_cast<int>(some_priority());
  Ids ids = some_ids(num_blocks);
  if (rng.chance(70)) std::erase_if(ids, [&](int32_t id) { return naive_pool_.num_owned(id) != 1; });
  const int64_t num_lacking = num_blocks - static_cast<int64_t>(ids.size());
  if (num_lacking > 0 && num_lacking <= static_cast<int64_t>(naive_pool_.free.size())) {
    allocate(num_lacking);
    ids.insert(ids.end(), owned_.end() - num_lacking, owned_.end());
  }
  const bool can = naive_.can_insert(name, passed.wide, ids, held ? &held->naive : nullptr, priority);
  std::optional<Match> made;
  const Outcome came_to =
      outcome([&] { made = tree_->insert(passed.view(), ids, kNames[name], held ? &held->real : nullptr, priority); });
  expect((came_to == Outcome::kDone) == can, "insert came to another end");
  if (!can) return;
  std::vector<bool> was_owned;
  for (int32_t id : ids) was_owned.push_back(naive_pool_.num_owned(id) > 0);
  NaiveMatch naive = naive_.insert(name, passed.wide, ids, held ? &held->naive : nullptr, priority);
  const size_t begin = naive.path.size() - ids.size();
  for (size_t i = 0; i < ids.size(); ++i) {
    const NaiveBlock& block = naive_.blocks[naive.path[begin + i]];
    if (block.device == ids[i]) device_memory_[static_cast<size_t>(ids[i])] = block.content;
    if (was_owned[i]) disown({ids[i]});
  }
  if (held) matches_.erase(matches_.begin() + (held - matches_.data()));
  keep(std::move(*made), std::move(naive));
}

// --- eviction ---

void TreeLife::evict() {
  const int64_t count = rng.below(world_.max_blocks);
  expect(call([&] { return tree_->evict(count); }) == naive_.leave(count, false, nullptr),
         "evict freed another number");
}

void TreeLife::demote() {
  const int64_t count = rng.below(world_.max_blocks);
  const auto [num_freed, pairs] = call([&] { return tree_->demote(count); });
  std::vector<NaivePair> naive_pairs;
  expect(num_freed == naive_.leave(count, host_pool_ != nullptr, &naive_pairs), "demote freed another number");
  to_host(pairs, naive_pairs);
}

void TreeLife::evict_host() {
  const int64_t count = rng.below(4);
  expect(call([&] { return tree_->evict_host(count); }) == naive_.evict_host(count), "evict_host freed another number");
}

void TreeLife::drop() {
  const Passed passed(tokens(rng.below(world_.max_blocks * world_.block_size + 1)), rng.chance(50));
  const auto name = static_cast<int>(rng.below(3));
  const int64_t num_dropped = call([&] { return tree_->drop(passed.view(), kNames[name]); });
  expect(num_dropped == naive_.drop(name, passed.wide), "drop forgot another number of tokens");
}

void TreeLife::clear() {
  if (rng.chance(10)) expect(call([&] { return tree_->clear(); }) == naive_.clear(), "clear freed another number");
}

// --- comparing ---

void TreeLife::compare_path(const Held& held) {
  const auto size = static_cast<int64_t>(held.naive.path.size());
  const int64_t num_on_device = naive_.on_device(held.naive.path);
  expect(held.real.num_blocks() == size && held.real.priority() == held.naive.priority, "a match has another path");
  expect(tree_->num_device_blocks(held.real) == num_on_device, "a match has another part on the device");
  Ids ids(static_cast<size_t>(size));
  const Outcome found = outcome_of([&] { tree_->copy_block_ids(held.real, 0, ids); });
  expect((found == Outcome::kDone) == (num_on_device == size), "copy_block_ids came to another end");
  Ids rows(3 * ids.size());
  tree_->copy_path(held.real, 0, rows);
  for (size_t i = 0; i < ids.size(); ++i)
    expect(rows[2 * ids.size() + i] == naive_.blocks[held.naive.path[i]].companion, "a block has another companion");
  for (size_t i = 0; i < ids.size() && found == Outcome::kDone; ++i) {
    const NaiveBlock& block = naive_.blocks[held.naive.path[i]];
    expect(ids[i] == block.device, "a match names another block");
    expect(device_memory_[static_cast<size_t>(ids[i])] == block.content, "a match names a block with another content");
  }
}

void TreeLife::compare_memory() {
  for (const NaiveBlock& block : naive_.blocks) {
    if (!block.is_live) continue;
    if (block.device != kNone)
      expect(device_memory_[static_cast<size_t>(block.device)] == block.content, "a device block has another content");
    if (block.host == 0) continue;
    const auto at = std::find(host_number_.begin(), host_number_.end(), block.host) - host_number_.begin();
    expect(host_memory_[static_cast<size_t>(at)] == block.content, "a host block has another content");
  }
}

// Runs that could not be given back for lack of memory are no fault; they are looked for last.
void TreeLife::check() {
  pool_->check_invariants();
  if (host_pool_) host_pool_->check_invariants();
  try {
    tree_->check_invariants(owned_, host_pool_ ? std::optional(std::span<const int32_t>()) : std::nullopt);
  } catch (const std::runtime_error& error) {
    const bool is_waste = std::string_view(error.what()).find("keeps memory") != std::string_view::npos;
    if (!is_waste || !Allocations::of_this_thread().has_failed_to_shrink) throw;
  }
}

void TreeLife::compare() {
  check();
  expect(pool_->num_free() == static_cast<int64_t>(naive_pool_.free.size()), "another number of blocks is free");
  expect(tree_->num_cached() == naive_.count(&NaiveBlock::device, false), "another number of blocks is cached");
  expect(tree_->num_evictable() == naive_.count(&NaiveBlock::device, true), "another number of blocks is evictable");
  expect(tree_->num_host_cached() == naive_.count_host(false), "another number of host blocks is cached");
  expect(tree_->num_host_evictable() == naive_.count_host(true), "another number of host blocks is evictable");
  expect(tree_->num_matches() == static_cast<int64_t>(matches_.size()), "another number of matches is live");
  if (host_pool_) expect(host_pool_->num_free() == naive_.num_free_host, "another number of host blocks is free");
  for (int64_t id = 0; id < world_.num_blocks; ++id)
    expect(pool_->ref_count(id) == naive_pool_.counts[id], "block ", id, " has ", pool_->ref_count(id), " references");
  compare_memory();
  for (const Held& held : matches_) compare_path(held);
}

void TreeLife::end() {
  while (!matches_.empty()) release_at(0);
  tree_->clear();
  pool_->release(owned_);
  owned_.clear();
  expect(pool_->num_free() == world_.num_blocks, "blocks are lost");
  if (host_pool_) expect(host_pool_->num_free() == world_.num_host_blocks, "host blocks are lost");
  expect(tree_->num_nodes() == 0 && tree_->num_matches() == 0, "an empty tree has nodes or matches");
}

// Whatever is found must be what was written under just these tokens.
void TreeLife::end_without_model() {
  check();
  for (const NaiveBlock& block : naive_.blocks)
    if (block.is_live) check_findable(block);
  while (!matches_.empty()) {
    tree_->release(matches_.back().real);
    matches_.pop_back();
  }
  end();
}

void TreeLife::check_findable(const NaiveBlock& last) {
  std::vector<const NaiveBlock*> path = {&last};
  while (path.back()->parent >= 0) path.push_back(&naive_.blocks[path.back()->parent]);
  std::reverse(path.begin(), path.end());
  Tokens wanted;
  for (const NaiveBlock* block : path) wanted.insert(wanted.end(), block->tokens.begin(), block->tokens.end());
  wanted.push_back(0);
  const int name = -2 - path.front()->parent;
  Match found = tree_->match(TokenView(wanted.data(), static_cast<int64_t>(wanted.size())), kNames[name]);
  const int64_t num_host_only = found.num_blocks() - tree_->num_device_blocks(found);
  tree_->evict(num_host_only);
  Ids ids(static_cast<size_t>(std::min(num_host_only, pool_->num_free())));
  pool_->allocate(ids);
  for (const auto& [host, device] : tree_->promote(found, ids))
    device_memory_[static_cast<size_t>(device)] = host_memory_[static_cast<size_t>(host)];
  tree_->trim(found);
  Ids found_ids(static_cast<size_t>(found.num_blocks()));
  tree_->copy_block_ids(found, 0, found_ids);
  for (size_t i = 0; i < found_ids.size(); ++i)
    expect(device_memory_[static_cast<size_t>(found_ids[i])] == path[i]->content, "a found block has another content");
  tree_->release(found);
}
