// Which tokens stay, by bisection. A key is the bits of |score|: the likeliest token has key 0, and keys ascend as
// tokens become less likely. For files that are compiled once per instruction set.
//
//   keys      0      a      b  b      c        d       the mass of tokens before a key: their number, or their weights
//   mass      0     .5     .7 .7     .85      .95
//   target .8 |--------------------|          the last key that stays is the last with less than the target before it
#pragma once

#include "sampling/whole_weights.h"
#include "simd/compress.h"

namespace kvpage {
namespace {

constexpr int32_t kNoKey = INT32_MAX;   // pads lists to whole units; its weight is 0
constexpr int64_t kUnit = 2 * kLanes;

constexpr int64_t kStretch = 4096;     // weights whose parts are summed up in 32 bits

struct KeyList {
  const int32_t* keys;
  Weights weights;  // null: each token weighs 1
  int64_t size;     // padded to whole units
};

struct Mass {
  int64_t count, weight;
};

inline int32_t key_of(float score) { return static_cast<int32_t>(bit_cast<uint32_t>(score) & 0x7fffffffu); }
inline float score_of(int32_t key) { return -bit_cast<float>(key); }
inline IntVec splat_key(int32_t key) { return key - IntVec{}; }
inline int64_t padded_to_unit(int64_t size) { return (size + kUnit - 1) / kUnit * kUnit; }

inline IntVec load_keys(const int32_t* from) {
  IntVec to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

template <bool kWeighted>
inline Mass mass_before(const KeyList& list, int32_t key) {
  const IntVec limit = splat_key(key);
  int64_t count = 0, weight = 0;
  for (int64_t begin = 0; begin < list.size; begin += kStretch) {
    const int64_t end = begin + kStretch < list.size ? begin + kStretch : list.size;
    WeightVec sums = {};
    IntVec counts = {};
    for (int64_t i = begin; i < end; i += kLanes) {
      const IntVec is_before = load_keys(list.keys + i) < limit;
      counts -= is_before;
      if constexpr (kWeighted) {
        sums.coarse += is_before & load_keys(list.weights.coarse + i);
        sums.fine += is_before & load_keys(list.weights.fine + i);
      }
    }
    count += sum_words(bit_cast<WordVec>(counts));
    if constexpr (kWeighted) weight += sum_of(sums);
  }
  return {count, kWeighted ? weight : count};
}

// Returns a key between two that are not neighbours: by value, or by bits where that does not go on.
inline int32_t key_between(int32_t low, int32_t end, int step) {
  constexpr int kStepsByValue = 24;
  const int32_t middle = bit_cast<int32_t>(0.5f * (bit_cast<float>(low) + bit_cast<float>(end)));
  if (step < kStepsByValue && middle > low && middle < end) return middle;
  return low + (end - low) / 2;
}

// Copies the keys in [low, end) to the front of `keys`, which may be the list's own. Returns the new list.
template <bool kWeighted>
inline KeyList narrowed(const KeyList& list, int32_t low, int32_t end, const WorkList& work) {
  int32_t* keys = work.keys;
  const IntVec below = splat_key(low - 1), limit = splat_key(end);
  int64_t size = 0;
  for (int64_t i = 0; i < list.size; i += kLanes) {
    const IntVec these = load_keys(list.keys + i);
    const uint32_t bits = less_bits(these, limit) & less_bits(below, these);
    if constexpr (kWeighted) {
      store_packed(work.weights.coarse + size, load_keys(list.weights.coarse + i), bits);
      store_packed(work.weights.fine + size, load_keys(list.weights.fine + i), bits);
    }
    store_packed(keys + size, these, bits);
    size += num_bits(bits);
  }
  for (int64_t i = size; i < padded_to_unit(size); ++i) {
    keys[i] = kNoKey;
    if constexpr (kWeighted) work.weights.coarse[i] = work.weights.fine[i] = 0;
  }
  return {keys, work.weights, padded_to_unit(size)};
}

// Returns the last key, below `end`, that has less than `target` (above 0) before it. `count`: at least the number of
// keys below `end`. work: as long as the list.
template <bool kWeighted>
int32_t last_kept_key(KeyList list, int64_t count, int32_t end, double target, const WorkList& work) {
  constexpr int64_t kShort = 4 * kLanes;
  int32_t low = 0;
  Mass at_low = {}, removed = {};
  for (int step = 0; count - at_low.count > 1 && end - low > 1; ++step) {
    const int32_t middle = key_between(low, end, step);
    Mass found = mass_before<kWeighted>(list, middle);
    found.count += removed.count, found.weight += removed.weight;
    if (static_cast<double>(found.weight) < target) {
      low = middle, at_low = found;
    } else {
      end = middle, count = found.count;
    }
    if (list.size > kShort && 4 * (count - at_low.count) < list.size) {
      list = narrowed<kWeighted>(list, low, end, work);
      removed = at_low;
    }
  }
  return end - 1;
}

}  // namespace
}  // namespace kvpage
