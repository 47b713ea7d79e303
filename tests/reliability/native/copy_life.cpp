#include "copy_life.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "copy/copier/block_copier.h"
#include "copy/host/host_copy.h"
#include "copy/sm_kernel/kernel_on_host.h"
#include "copy/sm_kernel/launch_plan.h"

using kvpage::CacheView;
using kvpage::CopyPlan;

CopyLife::CopyLife(uint64_t seed, Figures* figures) : Life(seed, figures), is_same_(rng.chance(30)) {
  shape_.block_dim = static_cast<int>(rng.below(2));
  shape_.sizes = {2, 2, 1 + rng.below(3), 1 + rng.below(3), 1 + rng.below(5)};
  shape_.element_bytes = int64_t{1} << rng.below(4);
  const int64_t num_layers = 1 + rng.below(3);
  src_.layers.resize(static_cast<size_t>(num_layers));
  dst_.layers.resize(src_.layers.size());
  src_ = view(&src_memory_, rng.below(7));
  dst_ = is_same_ ? src_ : view(&dst_memory_, rng.below(7));
  naive_ = is_same_ ? src_memory_ : dst_memory_;
  geometry_ = std::make_unique<kvpage::CopyGeometry>(std::vector{shape_}, src_, dst_);
}

// Of one layer, in some order of dimensions, now and then with room between: and how many bytes one block step, or with
// the block not first the whole of 7 blocks, takes.
std::vector<int64_t> CopyLife::strides(bool block_first, int64_t* num_bytes) {
  std::vector<size_t> order(shape_.sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = order.size() - 1; i > 0; --i)
    std::swap(order[i], order[static_cast<size_t>(rng.below(static_cast<int64_t>(i) + 1))]);
  const auto block = std::find(order.begin(), order.end(), static_cast<size_t>(shape_.block_dim));
  if (block_first) std::rotate(order.begin(), block, block + 1);
  std::vector<int64_t> found(order.size());
  int64_t step = shape_.element_bytes;
  for (size_t i = order.size(); i-- > 0;) {
    found[order[i]] = step;
    const bool is_block = static_cast<int>(order[i]) == shape_.block_dim;
    if (is_block && block_first) break;
    step *= is_block ? 7 : shape_.sizes[order[i]];
    if (rng.chance(15)) step += shape_.element_bytes * (1 + rng.below(2));
  }
  *num_bytes = step;
  return found;
}

// Layers one after the other in one memory, or packed: every layer of a block, then the next block.
CacheView CopyLife::view(Bytes* memory, int64_t num_blocks) {
  const bool is_packed = rng.chance(50);
  const auto num_layers = static_cast<int64_t>(src_.layers.size());
  int64_t num_bytes = 0;
  std::vector<int64_t> found = strides(is_packed, &num_bytes);
  const int64_t layer_step = num_bytes;
  if (is_packed) found[static_cast<size_t>(shape_.block_dim)] = num_layers * layer_step;
  const int64_t margin = 16 + shape_.element_bytes * rng.below(3);
  memory->resize(static_cast<size_t>(num_layers * layer_step * (is_packed ? 7 : 1) + 2 * margin));
  for (std::byte& each : *memory) each = static_cast<std::byte>(rng.next());
  CacheView made{{}, num_blocks};
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const auto address = reinterpret_cast<uintptr_t>(memory->data() + margin + layer * layer_step);
    made.layers.push_back({static_cast<kvpage::Address>(address), found});
  }
  return made;
}

// Mostly such as can be copied.
CopyLife::Pairs CopyLife::some_pairs() {
  Pairs pairs;
  const bool is_any = rng.chance(20);
  for (int64_t id = 0; id < dst_.num_blocks; ++id) {
    if (rng.chance(40)) continue;
    const int64_t src_id = is_any ? rng.below(9) - 1 : rng.below(std::max<int64_t>(src_.num_blocks, 1));
    pairs.insert(pairs.end(), {src_id, is_any && rng.chance(30) ? rng.below(9) - 1 : id});
  }
  return pairs;
}

bool CopyLife::can_copy(const Pairs& pairs) const {
  std::set<int64_t> named, changed;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    const bool is_in_range =
        pairs[i] >= 0 && pairs[i] < src_.num_blocks && pairs[i + 1] >= 0 && pairs[i + 1] < dst_.num_blocks;
    if (!is_in_range || !named.insert(pairs[i + 1]).second) return false;
    if (pairs[i] != pairs[i + 1]) changed.insert(pairs[i + 1]);
  }
  for (size_t i = 0; i < pairs.size() && is_same_; i += 2)
    if (pairs[i] != pairs[i + 1] && changed.contains(pairs[i])) return false;
  return true;
}

void CopyLife::copy_naively(const Pairs& pairs) {
  const Bytes before = is_same_ ? naive_ : src_memory_;
  for (size_t i = 0; i < pairs.size(); i += 2) copy_block(pairs[i], pairs[i + 1], before);
}

void CopyLife::copy_block(int64_t src_id, int64_t dst_id, const Bytes& before) {
  const auto src_base = reinterpret_cast<uintptr_t>(src_memory_.data());
  const auto dst_base = reinterpret_cast<uintptr_t>(is_same_ ? src_memory_.data() : dst_memory_.data());
  int64_t num_elements = 1;
  for (size_t i = 0; i < shape_.sizes.size(); ++i)
    if (static_cast<int>(i) != shape_.block_dim) num_elements *= shape_.sizes[i];
  for (size_t layer = 0; layer < src_.layers.size(); ++layer) {
    for (int64_t element = 0; element < num_elements; ++element) {
      uintptr_t from = src_.layers[layer].address - src_base, to = dst_.layers[layer].address - dst_base;
      int64_t rest = element;
      for (size_t i = 0; i < shape_.sizes.size(); ++i) {
        const bool is_block = static_cast<int>(i) == shape_.block_dim;
        const int64_t size = is_block ? 1 : shape_.sizes[i];
        from += static_cast<uintptr_t>(src_.layers[layer].strides[i] * (is_block ? src_id : rest % size));
        to += static_cast<uintptr_t>(dst_.layers[layer].strides[i] * (is_block ? dst_id : rest % size));
        rest /= size;
      }
      std::copy_n(before.begin() + static_cast<int64_t>(from), shape_.element_bytes,
                  naive_.begin() + static_cast<int64_t>(to));
    }
  }
}

void CopyLife::run(const CopyPlan& plan, const Pairs& pairs) {
  if (rng.chance(40)) return call([&] { kvpage::copy_on_host(plan, 3); });
  if (rng.chance(50)) {
    const kvpage::Placement placement{kvpage::kHost, kvpage::kHost, false};
    return call([&] {
      kvpage::BlockCopier copier({shape_}, src_, dst_, placement, {0, 1});
      copier.run(pairs.data(), static_cast<int64_t>(pairs.size()) / 2, 0, 2);
    });
  }
  const int64_t widest = kvpage::plan_vector_bytes(plan);
  const int64_t vector_bytes = rng.chance(50) ? widest : std::max<int64_t>(widest / 2, 1);
  const int64_t capacity = rng.chance(50) ? 32768 : 2 * (sizeof(kvpage::Fragment) + sizeof(kvpage::BlockPair));
  call([&] { kvpage::run_copy_kernel_on_host(plan, vector_bytes, kvpage::kLanes * (1 + rng.below(9)), capacity); });
}

void CopyLife::step() {
  const Pairs pairs = some_pairs();
  const bool can = can_copy(pairs);
  std::optional<CopyPlan> plan;
  const auto num_pairs = static_cast<int64_t>(pairs.size()) / 2;
  const Outcome came_to = outcome([&] { plan.emplace(*geometry_, pairs.data(), num_pairs); });
  expect((came_to == Outcome::kDone) == can, "a plan came to another end");
  if (can) {
    run(*plan, pairs);
    copy_naively(pairs);
  }
  compare();
}

void CopyLife::compare() { expect((is_same_ ? src_memory_ : dst_memory_) == naive_, "a byte is another"); }
